/* The core of the protocol: decode nodes read pages of prefill nodes, prove them, commit them, give them back.

   README.md says what stands for what. A weakening is an -D of its own; it takes one precaution away. Three worst cases
   on purpose: all source pages are of the same tokens, so only its generation tells two lives of a page apart, never
   its hash; a digest is trusted with what a link does to bytes and with nothing else; a restarted prefill node is still
   read at its old addresses. Every step uses up something that doesn't come back (a life of a page, a request, a
   restart, a flipped bit, a page in quarantine), so every run ends, and what holds at its end (Finally) comes about. */

/* --- bounds ------------------------------------------------------------------------------------------------------- */
#ifndef PREFILLS
#define PREFILLS 1
#endif
#ifndef DECODES
#define DECODES 1
#endif
#ifndef REQUESTS
#define REQUESTS 2      /* of a decode node, one after the other; an aborted one's read may outlive it */
#endif
#ifndef LIVES
#define LIVES 2         /* times that pages of one prefill node are written again; 1 after a restart */
#endif
#ifndef RESTARTS
#define RESTARTS 1      /* of any node */
#endif
#ifndef FLIPS
#define FLIPS 1         /* reads that a link damages */
#endif
#define PAGES 2         /* of each node */
#define SOURCES (PREFILLS * PAGES)
#define TARGETS (DECODES * PAGES)
#define P_OF(p) ((p) / PAGES)
#define D_OF(q) ((q) / PAGES)
#define FIRST_OF(d) ((d) * PAGES)
#define LAST_OF(d) ((d) * PAGES + PAGES - 1)

/* --- a source page and its row in the page table ------------------------------------------------------------------ */
#define VOID 0          /* free, its row not sealed */
#define OPEN 1          /* an engine step writes main, then index */
#define HALF 2
#define WRITTEN 3
#define SEALED 4
typedef Source {
  byte main, index;     /* the life whose bytes they are */
  byte gen; bit hash;   /* the row; only a sealed one has a hash */
  byte life;            /* ghost: how often it was written. A digest stands for one life */
  unsigned stage : 3;
  unsigned orphans : 3; /* live leases whose holder is gone */
  bit late              /* an abandoned engine step may still write */
};
Source S[SOURCES];
bit writing[PREFILLS];  /* one engine thread */
byte lives[PREFILLS];

/* --- the lease of each decode node's request ---------------------------------------------------------------------- */
#define NO_LEASE 0
#define LIVE 1
#define OVER 2
typedef Lease { unsigned st : 2; unsigned page : 2; byte gen };     /* gen: as it was announced */
Lease L[DECODES];
#define LEASE_ENDED(d) L[d].st = NO_LEASE; L[d].page = 0; L[d].gen = 0

/* --- a target page ------------------------------------------------------------------------------------------------ */
#define FREE 0
#define RESERVED 1
#define CACHED 2
#define QUARANTINED 3
#define MAIN 1
#define INDEX 2
#define BOTH 3
#define FLIPPED 99
typedef Target {
  byte main, index;     /* the life whose bytes they are */
  byte want;            /* ghost: the life that was announced for it */
  unsigned st : 2;
  unsigned owner : 3;   /* reservation, that is request; 0: nobody's, or the tree's */
  unsigned tree : 2     /* which of its caches the tree has */
};
Target T[TARGETS];
byte free[DECODES];     /* the allocator's count, kept and not counted */
#define WIPE_PAGE(q) \
  T[q].main = 0; T[q].index = 0; T[q].want = 0; T[q].st = FREE; T[q].owner = 0; T[q].tree = 0
#define GIVE_BACK(q, from) \
  assert(T[q].st == from);  /* law 1 */ \
  WIPE_PAGE(q); free[D_OF(q)]++

/* --- the read that was posted into target page q, and the landing row of its own ---------------------------------- */
#define ROW 4
#define ROW_LANDS 8
typedef Op {
  bit act, old, stalled, cut, aborted;    /* old: on the agent that is to be destroyed. cut: its source restarted */
  unsigned todo : 4;    /* what has not landed */
  unsigned src : 2;
  unsigned by : 3;      /* reservation */
  byte gen; bit hash    /* a row on its way */
};
Op O[TARGETS];
typedef Row { byte gen; bit hash };
Row R[TARGETS];
#ifdef ROW_REUSED
#define ROW_OF(q) FIRST_OF(D_OF(q))
#else
#define ROW_OF(q) (q)
#endif
#define WIPE_READ(q) \
  O[q].act = 0; O[q].old = 0; O[q].stalled = 0; O[q].cut = 0; O[q].aborted = 0; O[q].todo = 0; O[q].src = 0; \
  O[q].by = 0; O[q].gen = 0; O[q].hash = 0; R[q].gen = 0; R[q].hash = 0
#define MOVES(q) (O[q].act && !O[q].stalled)
#define NOT_YET(q, what) (MOVES(q) && !O[q].aborted && (O[q].todo & what))

/* --- the rest of a decode node, and of the world ------------------------------------------------------------------ */
#define IDLE 0
#define ARRIVED 1
#define VERIFIED 2
#define COMMITTED 3
#define MISMATCH 4
#define HALF_COMMITTED 5
typedef Job { unsigned st : 3; unsigned q : 2; unsigned r : 3 };
Job J[DECODES];         /* of the digest thread */
#define FORGET_JOB J[d].st = IDLE; J[d].q = 0; J[d].r = 0
bit rotating[DECODES];
byte restarts = RESTARTS, flips = FLIPS, ended = 0;

/* --- prefill: take a page, write it, seal it ---------------------------------------------------------------------- */
#define HELD_BY(d, p) (L[d].st == LIVE && L[d].page == p)
#if DECODES == 2
#define LEASED(p) (S[p].orphans || HELD_BY(0, p) || HELD_BY(1, p))
#else
#define LEASED(p) (S[p].orphans || HELD_BY(0, p))
#endif
#define MAY_OPEN(p) (lives[P_OF(p)] > 0 && !writing[P_OF(p)] && !LEASED(p))
#define OPENED(p) S[p].stage = OPEN; S[p].life++; lives[P_OF(p)]--; writing[P_OF(p)] = 1
#define BUMP(p) S[p].gen++; S[p].hash = 0
#if defined(REUSE_WITHOUT_BUMP)
#define BUMP_REUSED(p) S[p].hash = 0
#elif defined(LATE_BUMP)
#define BUMP_REUSED(p) skip
#else
#define BUMP_REUSED(p) BUMP(p)
#endif
#if defined(REWRITE_WITHOUT_BUMP)
#define BUMP_REWRITTEN(p) S[p].hash = 0
#elif defined(LATE_BUMP)
#define BUMP_REWRITTEN(p) skip
#else
#define BUMP_REWRITTEN(p) BUMP(p)
#endif
proctype Page(byte p) {
end:
  do
  :: d_step { S[p].stage == VOID && MAY_OPEN(p) -> OPENED(p); printf("P%d: page %d is reserved\n", P_OF(p), p) }
  :: d_step { S[p].stage == SEALED && MAY_OPEN(p) -> BUMP_REUSED(p); OPENED(p);
       printf("P%d: page %d is evicted and reserved for another request: generation %d\n", P_OF(p), p, S[p].gen) }
  :: d_step { S[p].stage == SEALED && MAY_OPEN(p) -> BUMP_REWRITTEN(p); OPENED(p);
       printf("P%d: page %d is to be written again by its owner: generation %d\n", P_OF(p), p, S[p].gen) }
  :: d_step { S[p].stage == OPEN -> S[p].main = S[p].life; S[p].stage = HALF;
       printf("P%d: page %d: main written, life %d\n", P_OF(p), p, S[p].life) }
  :: d_step { S[p].stage == HALF -> S[p].index = S[p].life; S[p].stage = WRITTEN;
#ifdef LATE_BUMP
       BUMP(p);
#endif
       printf("P%d: page %d: index written, life %d\n", P_OF(p), p, S[p].life) }
  :: d_step { S[p].stage == WRITTEN -> S[p].hash = 1; S[p].stage = SEALED; writing[P_OF(p)] = 0;
       printf("P%d: page %d is sealed: generation %d, life %d\n", P_OF(p), p, S[p].gen, S[p].life) }
  :: d_step { S[p].stage == WRITTEN -> S[p].stage = VOID; writing[P_OF(p)] = 0;
       printf("P%d: page %d is freed unsealed: its request is aborted, and its step has ended\n", P_OF(p), p) }
#ifdef STEP_ABANDONED
  :: d_step { S[p].stage == HALF -> S[p].stage = VOID; writing[P_OF(p)] = 0; S[p].late = 1;
       printf("P%d: page %d is freed: its request is aborted, its step goes on\n", P_OF(p), p) }
#endif
  :: d_step { S[p].orphans > 0 -> S[p].orphans--; printf("P%d: a lease that nobody renews expires\n", P_OF(p)) }
  od
}

/* A lease may expire at any time: a renewal in time is an expiry that doesn't come, a late one changes nothing. */
proctype Clock(byte d) {
end:
  do
  :: d_step { L[d].st == LIVE -> L[d].st = OVER; printf("P: the lease of D%d expires\n", d) }
#ifdef LATE_RENEWAL_REVIVES
  :: d_step { L[d].st == OVER -> L[d].st = LIVE; printf("P: the lease of D%d is renewed\n", d) }
#endif
  od
}

/* A new incarnation at the same addresses, its generations from another base; reads that run may end, fail or stall. */
#ifdef GENERATIONS_FROM_ZERO
#define BASE 0
#else
#define BASE 100
#endif
#define REBORN 50       /* life that no page has before; how many it had doesn't matter any more */
proctype RestartPrefill(byte n) {
  byte i;
end:
  d_step { restarts > 0 -> restarts--; printf("P%d: restarts\n", n);
    for (i : FIRST_OF(n) .. LAST_OF(n)) {
      S[i].main = 0; S[i].index = 0; S[i].gen = BASE; S[i].hash = 0; S[i].life = REBORN; S[i].stage = VOID;
      S[i].orphans = 0; S[i].late = 0 }
    writing[n] = 0; lives[n] = 1;
    for (i : 0 .. DECODES - 1) { if :: L[i].st == LIVE && P_OF(L[i].page) == n -> L[i].st = OVER :: else fi }
    for (i : 0 .. TARGETS - 1) { if :: MOVES(i) && P_OF(O[i].src) == n -> O[i].cut = 1 :: else fi }
    i = 0 }
}

/* --- the NIC: lands what was asked for in any order, or stalls for ever ------------------------------------------- */
#define LAND(q, half, what) O[q].todo = O[q].todo - what; T[q].half = S[O[q].src].half
proctype Nic(byte q) {
end:
  do
  :: d_step { NOT_YET(q, MAIN) -> LAND(q, main, MAIN); printf("NIC: main lands in %d: life %d\n", q, T[q].main) }
  :: d_step { NOT_YET(q, INDEX) -> LAND(q, index, INDEX); printf("NIC: index lands in %d: life %d\n", q, T[q].index) }
  :: d_step { NOT_YET(q, INDEX) && flips > 0 -> LAND(q, index, INDEX); T[q].index = FLIPPED; flips--;
       printf("NIC: index lands in %d with a bit flipped\n", q) }
  :: d_step { MOVES(q) && O[q].todo == ROW -> O[q].todo = ROW_LANDS;
       O[q].gen = S[O[q].src].gen; O[q].hash = S[O[q].src].hash;
       printf("NIC: the row for %d is read: generation %d\n", q, O[q].gen) }
  :: d_step { MOVES(q) && O[q].todo == ROW_LANDS -> O[q].todo = 0;
       R[ROW_OF(q)].gen = O[q].gen; R[ROW_OF(q)].hash = O[q].hash; O[q].gen = 0; O[q].hash = 0;
       printf("NIC: the row for %d lands: generation %d\n", q, R[ROW_OF(q)].gen) }
  :: d_step { MOVES(q) && O[q].todo -> O[q].stalled = 1; O[q].todo = BOTH; O[q].cut = 0; O[q].gen = 0; O[q].hash = 0;
       T[q].main = 0; T[q].index = 0; printf("NIC: the read into %d stalls\n", q) }
  /* a proven end of an aborted read; what is left of its data has landed before, wherever that may be */
  :: d_step { MOVES(q) && O[q].aborted && (O[q].cut || O[q].todo == 0 || O[q].todo == BOTH) ->
       if :: T[q].st == QUARANTINED && T[q].owner == O[q].by -> GIVE_BACK(q, QUARANTINED) :: else fi;
       WIPE_READ(q); printf("D%d: the read into %d has settled\n", D_OF(q), q) }
  od
}

/* --- fence by rotation: a second agent takes new reads; the old one is destroyed when its healthy reads have ended  */
#define STUCK(q) (O[q].act && O[q].aborted && !O[q].old)
#ifdef FENCE_WITHOUT_NEED
#define NEEDED(d) true
#else
#define NEEDED(d) (STUCK(FIRST_OF(d)) || STUCK(LAST_OF(d)))
#endif
#define HEALTHY(q) (O[q].act && !O[q].aborted && O[q].old)
#define LEAVE_ON_OLD(q) if :: O[q].act -> O[q].old = 1 :: else fi
#define BACK(q) if :: T[q].st == QUARANTINED -> GIVE_BACK(q, QUARANTINED) :: else fi
#define DESTROY(q) if :: O[q].act && O[q].old -> WIPE_READ(q); BACK(q) :: else fi
#define RELEASE(q) STUCK(q) && T[q].st == QUARANTINED -> BACK(q); printf("D%d: the read into %d is released\n", d, q)
proctype Fence(byte d) {
end:
  do
#ifdef NO_FENCE
  :: false
#else
  :: d_step { !rotating[d] && NEEDED(d) -> rotating[d] = 1;
       LEAVE_ON_OLD(FIRST_OF(d)); LEAVE_ON_OLD(LAST_OF(d));
       printf("D%d: a second agent stands beside the old one\n", d);
#ifdef FENCE_BEFORE_DESTROY
       BACK(FIRST_OF(d)); BACK(LAST_OF(d))
#endif
     }
  :: d_step { rotating[d] && !HEALTHY(FIRST_OF(d)) && !HEALTHY(LAST_OF(d)) -> rotating[d] = 0;
       DESTROY(FIRST_OF(d)); DESTROY(LAST_OF(d)); printf("D%d: the old agent is destroyed\n", d) }
#endif
#ifdef FREED_ON_RELEASE
  :: d_step { RELEASE(FIRST_OF(d)) }
  :: d_step { RELEASE(LAST_OF(d)) }
#endif
  od
}

/* --- verify, then commit: two steps, and the request may end between them ----------------------------------------- */
#ifdef DIGEST_SKIPPED
#define PROVED 1
#else
#define PROVED (T[J[d].q].main != FLIPPED && T[J[d].q].index != FLIPPED)
#endif
#define ALIVE (T[J[d].q].owner == J[d].r && T[J[d].q].st == RESERVED)
#ifdef COMMIT_UNBOUND
#define MAY_COMMIT 1
#else
#define MAY_COMMIT ALIVE
#endif
proctype Digest(byte d) {
end:
  do
  :: d_step { J[d].st == ARRIVED && PROVED -> J[d].st = VERIFIED;
       printf("D%d: page %d is verified for request %d\n", d, J[d].q, J[d].r) }
  :: d_step { J[d].st == ARRIVED && !PROVED -> printf("D%d: page %d isn't what was announced\n", d, J[d].q);
       if :: ALIVE -> J[d].st = MISMATCH :: else -> FORGET_JOB fi }
  :: d_step { J[d].st == VERIFIED && MAY_COMMIT ->
       printf("D%d: page %d is committed for request %d\n", d, J[d].q, J[d].r);
       assert(ALIVE);  /* law 5 */
       assert(T[J[d].q].main == T[J[d].q].want && T[J[d].q].index == T[J[d].q].want);  /* law 5 */
#ifdef INDEX_APART
       T[J[d].q].tree = MAIN; J[d].st = HALF_COMMITTED }
  :: d_step { J[d].st == HALF_COMMITTED ->
#endif
       WIPE_PAGE(J[d].q); T[J[d].q].st = CACHED; T[J[d].q].tree = BOTH; J[d].st = COMMITTED }
  :: d_step { J[d].st == VERIFIED && !MAY_COMMIT -> printf("D%d: request %d has ended\n", d, J[d].r); FORGET_JOB }
  od
}

/* --- decode: one request after the other -------------------------------------------------------------------------- */
#define RESERVE(x) r++; q = x; WIPE_PAGE(q); T[q].st = RESERVED; T[q].owner = r
#define POST(what) O[q].act = 1; O[q].todo = what; O[q].src = p; O[q].by = r
#ifdef ROW_FIRST
#define FIRST ROW
#define SECOND BOTH
#else
#define FIRST BOTH
#define SECOND ROW
#endif
#define DONE(q) (O[q].act && O[q].todo == 0)
#ifdef NO_QUARANTINE
#define HOLD_BACK(q) GIVE_BACK(q, RESERVED)
#else
#define HOLD_BACK(q) T[q].st = QUARANTINED; T[q].main = 0; T[q].index = 0; T[q].want = 0
#endif
/* Abort or deadline, by whomever, while a read runs: it has no proven end. */
#define ABORTED O[q].act -> O[q].aborted = 1; HOLD_BACK(q); \
  if :: O[q].todo & BOTH -> O[q].todo = BOTH; O[q].src = 0; O[q].cut = 0 :: else fi; \
  printf("D%d: request %d is aborted, its read into %d runs\n", d, r, q)
/* A disconnect is a proven end. */
#define LOST MOVES(q) && O[q].cut -> WIPE_READ(q); GIVE_BACK(q, RESERVED); \
  printf("D%d: request %d lost its peer\n", d, r)
/* Memory and agents go with the process; its lease stays until it expires. */
#define RESTART restarts > 0 -> restarts--; printf("D%d: restarts\n", d); \
  WIPE_READ(FIRST_OF(d)); WIPE_PAGE(FIRST_OF(d)); WIPE_READ(LAST_OF(d)); WIPE_PAGE(LAST_OF(d)); \
  free[d] = PAGES; rotating[d] = 0; FORGET_JOB; \
  if :: L[d].st == LIVE -> S[p].orphans++ :: else fi; LEASE_ENDED(d)
proctype Decode(byte d) {
  byte r = 0, q = 0, p = 0; bit again = 0, differs = 0;
  do
  :: atomic { r < REQUESTS ->    /* match, lock and reserve at once, or wait and hold nothing */
       if
       :: T[FIRST_OF(d)].st == FREE -> RESERVE(FIRST_OF(d)); free[d]--
       :: T[FIRST_OF(d)].st != FREE && T[LAST_OF(d)].st == FREE -> RESERVE(LAST_OF(d)); free[d]--
       :: free[d] == 0 && T[FIRST_OF(d)].st == CACHED -> RESERVE(FIRST_OF(d))
       :: free[d] == 0 && T[LAST_OF(d)].st == CACHED -> RESERVE(LAST_OF(d))
       fi;
       printf("D%d: request %d reserves page %d\n", d, r, q) }
     if
     :: atomic {    /* Accepted, then PagesSealed */
          if
          :: S[0].stage == SEALED -> p = 0
          :: S[1].stage == SEALED -> p = 1
#if PREFILLS == 2
          :: S[2].stage == SEALED -> p = 2
          :: S[3].stage == SEALED -> p = 3
#endif
          fi;
          L[d].st = LIVE; L[d].page = p; L[d].gen = S[p].gen; T[q].want = S[p].life; POST(FIRST);
          printf("P%d: page %d is announced to D%d: generation %d, life %d\n", P_OF(p), p, d, L[d].gen, S[p].life) }
     :: d_step { GIVE_BACK(q, RESERVED); printf("D%d: request %d is aborted\n", d, r) } goto over
     :: d_step { RESTART } goto over
     fi;
attempt:
     if
     :: d_step { DONE(q) -> POST(SECOND); printf("D%d: first read into %d is done, the second is posted\n", d, q) }
     :: d_step { LOST } goto over
     :: d_step { ABORTED } goto over
     :: d_step { RESTART } goto over
     fi;
     if
     :: d_step { DONE(q) && J[d].st == IDLE && R[ROW_OF(q)].gen == L[d].gen && R[ROW_OF(q)].hash ->
          WIPE_READ(q); J[d].st = ARRIVED; J[d].q = q; J[d].r = r;
          printf("D%d: page %d has arrived, its row is equal\n", d, q) }
     :: d_step { DONE(q) && !(R[ROW_OF(q)].gen == L[d].gen && R[ROW_OF(q)].hash) ->
          WIPE_READ(q); GIVE_BACK(q, RESERVED); printf("D%d: the source of page %d was reused\n", d, q) } goto over
     :: d_step { LOST } goto over
     :: d_step { ABORTED } goto over
     :: d_step { RESTART } goto over
     fi;
     if
     :: atomic { J[d].st == COMMITTED -> FORGET_JOB;    /* PrefillDone, with prefill's account */
          if :: differs = 0 :: differs = 1; printf("P: accounts for other tokens than D%d expects\n", d) fi;
          if
#ifdef NO_ACCOUNT
          :: true ->
#else
          :: differs -> printf("D%d: request %d is refused\n", d, r)
          :: else ->
#endif
             printf("D%d: request %d is admitted\n", d, r);
             assert(!differs && T[q].st == CACHED && T[q].tree == BOTH);  /* law 5 */
          fi }
     :: d_step { J[d].st == MISMATCH && !again -> FORGET_JOB; again = 1; POST(FIRST);
          printf("D%d: page %d is read once more\n", d, q) } goto attempt
     :: d_step { J[d].st == MISMATCH && again -> FORGET_JOB; GIVE_BACK(q, RESERVED); printf("D%d: data loss\n", d) }
     :: d_step { J[d].st != IDLE -> printf("D%d: request %d is aborted\n", d, r);
          if :: T[q].st == RESERVED -> GIVE_BACK(q, RESERVED) :: else fi;
          if :: J[d].st == COMMITTED || J[d].st == MISMATCH -> FORGET_JOB :: else fi }
     :: d_step { RESTART }
     fi;
over:
     atomic {       /* its end: what it still holds is free already. Its lease is released; lost, it would expire */
#ifdef END_UNCHECKED
       WIPE_PAGE(q); free[d]++;
#endif
       LEASE_ENDED(d); q = 0; p = 0; again = 0; differs = 0 }
  :: r == REQUESTS -> break
  od;
  atomic { ended++; r = 0 }
}

/* --- the laws, in every state ------------------------------------------------------------------------------------- */
#if DECODES == 2
#define EVERY_D(law) (law(0) && law(1))
#define EVERY_TARGET(law) (law(0) && law(1) && law(2) && law(3))
#else
#define EVERY_D(law) law(0)
#define EVERY_TARGET(law) (law(0) && law(1))
#endif
#if PREFILLS == 2
#define EVERY_SOURCE(law) (law(0) && law(1) && law(2) && law(3))
#else
#define EVERY_SOURCE(law) (law(0) && law(1))
#endif
#define CONSERVED(d) (free[d] == (T[FIRST_OF(d)].st == FREE) + (T[LAST_OF(d)].st == FREE))
#define NO_LATE_READ(q) (!O[q].act || (T[q].st != CACHED && (T[q].st == FREE || T[q].owner == O[q].by)))
#define NO_LATE_STEP(p) (!S[p].late || S[p].stage == VOID)
#define ONE_FATE(q) (T[q].tree == 0 || (T[q].tree == BOTH && T[q].st == CACHED))
#define LEASE_KEEPS(d) (L[d].st != LIVE || (S[L[d].page].stage == SEALED && S[L[d].page].gen == L[d].gen))
#define LAW_2 (EVERY_TARGET(NO_LATE_READ) && EVERY_SOURCE(NO_LATE_STEP))
#define NOTHING_LEFT(q) (!O[q].act && (T[q].st == FREE || T[q].st == CACHED))
proctype Laws() {
end:
  atomic { !(EVERY_D(CONSERVED) && LAW_2 && EVERY_TARGET(ONE_FATE) && EVERY_D(LEASE_KEEPS)) ->
    assert(EVERY_D(CONSERVED));      /* law 1 */
    assert(LAW_2);                   /* law 2 */
    assert(EVERY_TARGET(ONE_FATE));  /* law 4 */
    assert(EVERY_D(LEASE_KEEPS));    /* lease */
  }
}
proctype Finally() {
  atomic { timeout ->
    assert(ended == DECODES && EVERY_TARGET(NOTHING_LEFT));  /* end */
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. SOURCES - 1) {
      S[i].main = 1; S[i].index = 1; S[i].life = 1; S[i].hash = 1; S[i].stage = SEALED; run Page(i) }
    for (i : 0 .. PREFILLS - 1) { lives[i] = LIVES; run RestartPrefill(i) }
    for (i : 0 .. TARGETS - 1) { run Nic(i) }
    for (i : 0 .. DECODES - 1) {
      T[FIRST_OF(i)].st = CACHED; T[FIRST_OF(i)].tree = BOTH; free[i] = PAGES - 1;
      run Clock(i); run Fence(i); run Digest(i); run Decode(i) }
    i = 0; run Laws(); run Finally()
  }
}
