"""A token from logits.

Guarantees: the same logits, sampling, and position give the same token on every node and in every run; nothing is drawn
from logits that hold NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from pdkv.errors import BadLogits, BoundsError
from pdkv.node.messages import Sampling


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float
    """Natural logarithm of the token's probability under the logits as they came, before temperature and top-p."""


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> SampledToken:
    """Draw the token that takes place `position` in the sequence from float32 [vocab] logits.

    Temperature 0 takes the largest logit, of equal ones the lowest id. Otherwise the smallest set of most probable
    tokens whose probability reaches `top_p` is drawn from with Philox noise keyed by (seed, position). Raises
    `BadLogits` and, for a temperature, top_p or position that means nothing, `BoundsError`.
    """
    _check(logits, sampling, position)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    token = int(exact.argmax()) if sampling.temperature == 0 else _draw(exact, sampling, position)
    return SampledToken(token, float(exact[token] - np.log(np.exp(exact).sum())))


def logits_digest(logits: npt.NDArray[np.float32]) -> int:
    """xxh3_64 of the little-endian float32 bytes: equal only for logits equal bit for bit (but for a collision)."""
    return xxhash.xxh3_64_intdigest(logits.astype("<f4").tobytes())


def _check(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> None:
    if logits.ndim != 1 or logits.size == 0:
        raise BoundsError("logits", f"shape {logits.shape}", "one row of at least one token")
    # written so that NaN fails too
    if not 0 <= sampling.temperature < np.inf:
        raise BoundsError("temperature", sampling.temperature, "0 or a positive number")
    if not 0 < sampling.top_p <= 1:
        raise BoundsError("top_p", sampling.top_p, "above 0, up to 1")
    if position < 0:
        raise BoundsError("position", position, "0 or more")
    require_finite(logits, position)


def require_finite(logits: npt.NDArray[np.float32], position: int) -> None:
    """Raises `BadLogits` naming the first token whose logit is NaN or infinite."""
    finite = np.isfinite(logits)
    if np.count_nonzero(finite) < finite.size:
        first = int(finite.argmin())
        raise BadLogits(
            f"logits at position {position}: {logits.size - int(finite.sum())} of {logits.size} are not finite",
            token=first,
            value=logits[first],
            position=position,
        )


def _draw(exact: npt.NDArray[np.float64], sampling: Sampling, position: int) -> int:
    """`exact`: logits less their maximum."""
    order = np.argsort(-exact, kind="stable")
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, that is to probability 0
        reach = np.cumsum(np.exp(exact[order] / sampling.temperature))
    kept = int(np.searchsorted(reach, sampling.top_p * reach[-1])) + 1
    key = np.array([sampling.seed % 2**64, position], np.uint64)
    point = np.random.Generator(np.random.Philox(key=key)).random() * reach[kept - 1]
    return int(order[np.searchsorted(reach[:kept], point, side="right")])
