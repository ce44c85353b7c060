"""What pdkv is measured against: the same pages moved without pdkv, by two processes that run `raw.py`.

    with Yardsticks(YardstickSettings(pieces(fmt, 512), num_pages=512)) as raw:
        for _ in range(5):  # in turns with pdkv's own pulls
            reading = raw.measure(Kind.NIXL_PAGES, Pages.of(local, remote))
        raw.ceiling(Pages.of(local, remote))  # does raw NIXL count on this machine?

Guarantees: nothing is running between two measurements, so they can take turns with anything else (two pairs with
different settings, too); the source's bytes come from a seed, and the first reading of each kind is compared with them
byte for byte; what a machine hasn't got is `Absent` with the reason, and never a figure; every wait has a deadline; no
process outlives the `with`, however it is left, nor this process.

Everything here blocks: call it from a thread where an event loop runs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from pdkv.errors import BoundsError, ConfigError, DeadlineExceeded, PeerLost, TransferError
from pdkv.geometry.page_layout import PageFormat, PlacementKind, layer_major, page_major, pool_map
from pdkv.machine.devices import devices
from pdkv.transfer.backends.ucx_settings import missing, tuning
from pdkv.transfer.descriptors import Piece, plan

RAW = Path(__file__).with_name("raw.py")
COUNTS_FROM = 0.9
"""Raw NIXL is a yardstick only if it reaches so much of what `process_vm_readv` does."""
LAST_WORDS_S = 5.0
"""Between a closed connection and the end of the process."""
_TAIL_LINES = 12


class Kind(StrEnum):
    """A way to move bytes from the source's memory into the sink's."""

    NIXL_LARGEST = "nixl_largest"
    """One READ of one descriptor as long as the pages together: what the wire can."""
    NIXL_PAGES = "nixl_pages"
    """One READ of the pages' pieces."""
    READV = "process_vm_readv"
    """What UCX's CMA lane does, without UCX. One host only."""
    MEMCPY = "memcpy"
    """One thread, within the sink."""
    GRPC = "grpc_stream"
    """A server stream of messages of up to 4 MiB, copied into the pages."""
    SOCKET = "socket"
    """`sendall` and `recv_into`."""
    UCX = "ucx"
    """Tagged messages, one a piece, through ucxx, or ucx-py where that is what there is."""
    MOONCAKE = "mooncake"
    """Mooncake's transfer engine over TCP, in batches."""


@dataclass(frozen=True, slots=True)
class YardstickSettings:
    """Two processes and their pools."""

    pieces: tuple[Piece, ...]
    """Where a page's bytes are on both sides, as offsets into one region; see `pieces`."""
    num_pages: int
    """Of each pool; page ids are below."""
    as_it_comes: bool = False
    """Not set up as pdkv does it: NIXL's progress thread on, memory and UCX as the system has them, descriptors as
    lists of tuples, which are made for each read."""
    spin: bool = False
    """Poll without a pause, instead of at the transfer engine's pace."""
    ucx_tls: str = ""
    """UCX transports to allow; empty: all. What the environment says has precedence."""
    rails: tuple[tuple[str, str], ...] = ()
    """UCX devices of source and sink, one agent a rail; pages go over the rails in turn. Empty: one agent, any."""
    source_prefix: tuple[str, ...] = ()
    """In front of the source's command line, as ("ip", "netns", "exec", NAME)."""
    sink_prefix: tuple[str, ...] = ()
    source_host: str = "127.0.0.1"
    """Where sink finds sockets of the source."""
    source_at: str = ""
    """HOST:PORT of a source that was started by hand: `source_command`. Empty: it is started here."""
    python: str = sys.executable
    """Of the processes started here: another one may have other optional packages."""
    seed: int = 1
    deadline_s: float = 120.0
    """For one question to one process."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Page i of `remote` goes into page i of `local`."""

    local: tuple[int, ...]
    remote: tuple[int, ...]

    @classmethod
    def of(cls, local: Iterable[int], remote: Iterable[int]) -> Self:
        """Of any integers, as a column of page ids. Raises `ConfigError` if there are none, or not as many of both."""
        pages = cls(tuple(map(int, local)), tuple(map(int, remote)))
        if not pages.local or len(pages.local) != len(pages.remote):
            raise ConfigError("remote pages", len(pages.remote), f"as many as local ones ({len(pages.local)}), not 0")
        return pages


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement: `bytes` moved once in each of `seconds`."""

    kind: Kind
    bytes: int
    seconds: tuple[float, ...]
    """Until the last byte is there; from the post, with the bytes' preparation only where the kind needs one a read."""
    post_s: tuple[float, ...]
    """Of these, until everything was posted; over CMA the copying is part of it. Zeros for kinds that don't post."""
    descriptors: int
    """As given: neighbours are not merged."""
    source_cpu_s: float
    """Of the process, over all of `seconds`."""
    sink_cpu_s: float
    verified: bool
    """Whether these bytes were compared with the source's."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, of the median."""
        return self.bytes / self.median_s / 1e9

    @property
    def cpu_s_per_gb(self) -> tuple[float, float]:
        """Of source and sink."""
        moved_gb = self.bytes * len(self.seconds) / 1e9
        return self.source_cpu_s / moved_gb, self.sink_cpu_s / moved_gb


@dataclass(frozen=True, slots=True)
class Absent:
    """A kind that this machine hasn't got."""

    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Raw NIXL against `process_vm_readv` of the same pages, taken in turns."""

    nixl_gb_per_s: float
    readv_gb_per_s: float

    @property
    def ratio(self) -> float:
        return self.nixl_gb_per_s / self.readv_gb_per_s

    @property
    def counts(self) -> bool:
        """Whether raw NIXL is as fast as it should be, so that a ratio to it means something."""
        return self.ratio >= COUNTS_FROM


def pieces(
    fmt: PageFormat, num_pages: int, local: PlacementKind = "page_major", remote: PlacementKind = "page_major"
) -> tuple[Piece, ...]:
    """What pdkv reads of each page, merged as pdkv merges it, with buffers of a pool end to end in one region."""
    maps = []
    for kind in (local, remote):
        placement = (page_major if kind == "page_major" else layer_major)(fmt, num_pages)
        starts = list(accumulate(placement.buffer_bytes, initial=0))[:-1]
        maps.append(pool_map(fmt, placement, starts, 0, 0, "DRAM", 0))
    return plan(*maps).pieces


def source_command(listen: str, python: str = sys.executable) -> list[str]:
    """What starts a source on another host: it listens at HOST:PORT for one controller, unencrypted, and trusts it."""
    return [python, str(RAW), "source", "--listen", listen]


class RawProcess:
    """One process that runs `raw.py`, asked and answering by lines of JSON. Closed, it has ended."""

    def __init__(self, role: str, prefix: Sequence[str], settings: YardstickSettings) -> None:
        self.role = role
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(prefix="pdkv-raw-")  # noqa: SIM115
        if role == "source" and settings.source_at:
            host, _, port = settings.source_at.rpartition(":")
            try:
                self._socket = socket.create_connection((host, int(port)), timeout=settings.deadline_s)
            except (OSError, ValueError) as error:
                raise PeerLost(f"no raw source at {settings.source_at}: {error}", address=settings.source_at) from error
        else:
            self._socket, theirs = socket.socketpair()
            line = [*prefix, settings.python, str(RAW), role]
            with theirs:
                # Ctrl-C is for this process, which then ends its children; a closed socket ends them, too
                self._process = subprocess.Popen(
                    line, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._log, start_new_session=True
                )
        self._socket.settimeout(settings.deadline_s)
        self._lines = self._socket.makefile("rb")

    @property
    def pid(self) -> int | None:
        """None if it was started by hand."""
        return self._process.pid if self._process else None

    def ask(self, op: str, **words: Any) -> dict[str, Any]:
        """Raises `PeerLost` with its last words if it ended instead, `DeadlineExceeded` if it says nothing."""
        try:
            self._socket.sendall(json.dumps({"op": op, **words}).encode() + b"\n")
            said = self._lines.readline()
        except TimeoutError as error:
            raise DeadlineExceeded(f"raw {self.role}: no answer to {op}", role=self.role, op=op) from error
        except OSError as error:
            raise self._lost(op) from error
        if not said:
            raise self._lost(op)
        answer: dict[str, Any] = json.loads(said)
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _lost(self, op: str) -> PeerLost:
        code: object = "a closed connection"
        if self._process is not None:
            try:
                code = self._process.wait(LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                code = "a closed pipe"
        self._log.seek(0)
        tail = b"\n".join(self._log.read().splitlines()[-_TAIL_LINES:]).decode(errors="replace")
        return PeerLost(f"raw {self.role} ended with {code} at {op}:\n{tail}", role=self.role, op=op)


@dataclass(slots=True)
class Yardsticks:
    """A source and a sink with filled pools, as long as the `with` lasts."""

    settings: YardstickSettings
    _source: RawProcess = field(init=False)
    _sink: RawProcess = field(init=False)
    _pool: dict[str, Any] = field(init=False, default_factory=dict)
    _verified: set[Kind] = field(init=False, default_factory=set)
    _held: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Raises `PeerLost` if a process ends before its pool is ready."""
        settings = self.settings
        with ExitStack() as starting:
            self._source = RawProcess("source", settings.source_prefix, settings)
            starting.callback(self._source.close)
            self._sink = RawProcess("sink", settings.sink_prefix, settings)
            starting.callback(self._sink.close)
            pool = {
                "pieces": [
                    [p.length, p.local_base, p.local_stride, p.remote_base, p.remote_stride] for p in settings.pieces
                ],
                "pages": settings.num_pages,
                "seed": settings.seed,
                "tuned": not settings.as_it_comes,
                "spin": settings.spin,
                "ucx": dict(_ucx_settings(settings)),
            }
            self._pool = self._source.ask("pool", **pool, host=settings.source_host)
            self._sink.ask("pool", **pool)
            self._held = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here: source, sink."""
        return [process.pid for process in (self._source, self._sink) if process.pid is not None]

    def measure(self, kind: Kind, pages: Pages, *, repeats: int = 1, verify: bool | None = None) -> Reading | Absent:
        """Connect, read a few pages, then the pages `repeats` times, and take everything down again.

        By default bytes are compared the first time that a kind is measured. Raises `TransferError` if they are other
        bytes than the source's, `BoundsError` for a page that no pool has, and what `RawProcess.ask` raises.
        """
        last = max(*pages.local, *pages.remote)
        if last >= self.settings.num_pages:
            raise BoundsError("page of a raw read", last, f"below {self.settings.num_pages}")
        wanted = kind not in self._verified if verify is None else verify
        rails = self.settings.rails
        here = self._source.ask("open", kind=kind, devices=[source for source, _ in rails])
        if "absent" in here:
            return Absent(kind, f"source: {here['absent']}")
        there = self._sink.ask("open", kind=kind, devices=[sink for _, sink in rails], at=self._pool | here)
        if "absent" in there:
            self._source.ask("close")
            return Absent(kind, f"sink: {there['absent']}")
        before = self._source.ask("usage")["cpu_s"]
        took = self._sink.ask("read", local=pages.local, remote=pages.remote, repeats=repeats, verify=wanted)
        source_cpu_s = self._source.ask("usage")["cpu_s"] - before
        self._sink.ask("close")
        self._source.ask("close")
        if took["wrong"]:
            raise TransferError(f"{kind}: {took['wrong']} places hold other bytes than the source's", kind=kind)
        if wanted:
            self._verified.add(kind)
        return Reading(
            kind,
            bytes=took["bytes"],
            seconds=tuple(took["seconds"]),
            post_s=tuple(took["post_s"]),
            descriptors=took["descriptors"],
            source_cpu_s=source_cpu_s,
            sink_cpu_s=took["cpu_s"],
            verified=wanted,
        )

    def ceiling(self, pages: Pages, *, rounds: int = 3) -> Ceiling | Absent:
        """Medians of `rounds` in turns; `Absent` where `process_vm_readv` is."""
        nixl: list[float] = []
        readv: list[float] = []
        for _ in range(rounds):
            for kind, rates in ((Kind.READV, readv), (Kind.NIXL_PAGES, nixl)):
                reading = self.measure(kind, pages)
                if isinstance(reading, Absent):
                    return reading
                rates.append(reading.gb_per_s)
        return Ceiling(statistics.median(nixl), statistics.median(readv))


def _ucx_settings(settings: YardstickSettings) -> Mapping[str, str]:
    """What isn't in the environment already. Without them, UCX comes as it is."""
    tls = {"UCX_TLS": settings.ucx_tls} if settings.ucx_tls and "UCX_TLS" not in os.environ else {}
    return tls if settings.as_it_comes else tls | missing(tuning(devices()))
