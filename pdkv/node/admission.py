"""What has to hold of prefill's last words before a token leaves a decode node.

Guarantees: nothing of them is used that is not finite, in its range and of the length that is due; a prompt is admitted
only if both nodes hold the same to be true of it, the draft hand-off included, and else refused field by field.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pdkv.contract import Contract
from pdkv.errors import ProtocolError
from pdkv.node.messages import DraftHandoff, PrefillDone
from pdkv.node.prompt import Prompt, account_of, require_equal_accounts


def require_end(done: PrefillDone, prompt: Prompt, contract: Contract, hidden_width: int) -> None:
    """What the account doesn't cover of prefill's last words; raises `ProtocolError`."""
    starts, tokens, vocab_size = done.chunk_starts, len(prompt.tokens), contract.vocab_size
    if not 0 <= done.first_token < vocab_size:
        raise ProtocolError(f"first token {done.first_token}, the vocabulary has {vocab_size}", token=done.first_token)
    if math.isnan(done.first_logprob) or not 0 <= done.prefill_s < math.inf:
        raise ProtocolError(f"logprob {done.first_logprob} of the first token, after {done.prefill_s} s of prefill")
    if any(b <= a for a, b in pairwise((-1, *starts, tokens))):
        raise ProtocolError(f"chunk starts {starts[:16]} don't rise within the {tokens} tokens of the prompt")
    require_handoff(done.draft, contract, tokens, hidden_width)


def require_admissible(done: PrefillDone, prompt: Prompt, contract: Contract, *, proved: bool) -> None:
    """Raises `AccountMismatch` with every field that differs between prefill's account and this node's own.

    Not `proved`: a node that was told to check no digests takes the hand-off, as it takes the pages, for what it is.
    """
    mine = account_of(prompt, contract, done.draft)
    if not proved:
        mine = replace(mine, draft_digest=done.account.draft_digest)
    require_equal_accounts(mine, done.account)


def require_handoff(draft: DraftHandoff | None, contract: Contract, prompt_tokens: int, width: int) -> None:
    """Raises `ProtocolError` unless a hand-off came where the contract has a draft layer, and nowhere else, with
    columns of the lengths that contract and draft head (`width`) say, finite numbers, tokens of the vocabulary and
    positions of the prompt.
    """
    if (draft is not None) != bool(contract.draft_layers):
        have = "a draft hand-off" if draft else "no draft hand-off"
        raise ProtocolError(f"{have}, with {contract.draft_layers} draft layers", draft_layers=contract.draft_layers)
    if draft is None:
        return
    seed = contract.index_topk + contract.index_kpool - 1 if contract.index_sharing else 0
    topk = contract.draft_topk
    for name, column, due in (
        ("hidden", draft.hidden, width),
        ("tokens", draft.tokens, topk),
        ("probabilities", draft.probabilities, topk),
        ("index_seed", draft.index_seed, seed),
    ):
        if column.shape != (due,):
            raise ProtocolError(f"draft hand-off: {name} of shape {column.shape}, due are {due}", field=name)
    if not np.isfinite(draft.hidden).all():
        raise ProtocolError("draft hand-off: hidden holds values that are not finite", field="hidden")
    if int(draft.tokens.max(initial=0)) >= contract.vocab_size:
        raise ProtocolError(f"draft hand-off: token {int(draft.tokens.max())} of {contract.vocab_size}", field="tokens")
    if not ((draft.probabilities >= 0) & (draft.probabilities <= 1)).all():  # written so that NaN fails too
        raise ProtocolError("draft hand-off: probabilities outside [0, 1]", field="probabilities")
    if seed and not -1 <= int(draft.index_seed.min()) <= int(draft.index_seed.max()) < prompt_tokens:
        raise ProtocolError(f"draft hand-off: index_seed outside [-1, {prompt_tokens})", field="index_seed")
