"""Announced pages whose columns don't fit are refused before anybody looks at a byte."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from pdkv.errors import BoundsError
from pdkv.ids import LocalPages, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.page_hash import chain

HASHES = chain(range(64 * 4))
FITTING = Arrival(ReservationId(7), 0, LocalPages(np.arange(1, 5, dtype=np.int32)), HASHES, np.zeros((4, 2), np.uint64))


@pytest.mark.parametrize(
    "change",
    [
        {"first_index": -1},
        {"hashes": HASHES.part(0, 3)},
        {"digests": np.zeros((3, 2), np.uint64)},
        {"digests": np.zeros((4, 2), np.int64)},
        {"digests": np.zeros(8, np.uint64)},
    ],
    ids=["index", "hashes", "rows", "dtype", "shape"],
)
def test_columns_that_don_t_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(BoundsError):
        dataclasses.replace(FITTING, **change)


def test_a_client_needs_no_tensors() -> None:
    code = "import sys, pdkv.rpc.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
