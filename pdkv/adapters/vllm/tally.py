"""What a worker counts, and how it is fetched: since the last time.

Guarantees: counts are only added to, on the event loop, and fetched whole from another thread; every name is in
`NAMES`, with its words; a failure's is followed by its kind: "loads_failed/PeerLost".
"""

from __future__ import annotations

import threading
from collections import Counter

from pdkv.adapters.vllm.loads import Loaded
from pdkv.errors import ContractMismatch, PdkvError

NAMES: dict[str, str] = {
    "loads": "Prompts that were fetched from another engine, wholly or in part.",
    "loads_failed": "Of those, the ones that ended with an error, by its kind.",
    "pages_loaded": "Pages that arrived and were proved.",
    "pages_failed": "Pages that were wanted and did not arrive, or were not what was meant.",
    "bytes_loaded": "Bytes of pages that were read.",
    "descriptors": "Descriptors that were posted for them.",
    "load_seconds": "Sum over loads, from the order to its end.",
    "post_seconds": "Of these, what posting the reads took; over a lane where the caller copies, the copy is in it.",
    "prompts_held": "Finished prompts that were kept for another engine.",
    "pages_held": "Their pages.",
    "contract_mismatches": "Contracts of other engines that differ from this one's.",
    "proofs_failed": "Pages that were reused while they were read, or whose digest differs.",
}
WITH_KIND = frozenset({"loads_failed"})


class Tally:
    """Of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def loaded(self, loaded: Loaded, wanted: int) -> None:
        if not wanted:
            return
        if loaded.error is not None:
            self._add(**{f"loads_failed/{loaded.error.kind}": 1})
        self._add(
            loads=1,
            pages_loaded=loaded.pages,
            pages_failed=wanted - loaded.pages,
            bytes_loaded=loaded.bytes,
            descriptors=loaded.descriptors,
            load_seconds=loaded.seconds,
            post_seconds=loaded.post_seconds,
        )

    def held(self, pages: int) -> None:
        self._add(prompts_held=1, pages_held=pages)

    def refused(self, error: PdkvError) -> None:
        """A proof has failed, whatever came of it."""
        self._add(**{"contract_mismatches" if isinstance(error, ContractMismatch) else "proofs_failed": 1})

    def take(self) -> dict[str, float]:
        """Since the last call, by name; those that are 0 are left out."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: value for name, value in counts.items() if value}

    def _add(self, **counts: float) -> None:
        with self._lock:
            for name, value in counts.items():
                self._counts[name] += value  # type: ignore[assignment]
