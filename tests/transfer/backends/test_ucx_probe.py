"""The UCX of this machine, and processes that end as it might."""

import sys

import pytest

from pdkv.errors import TransferError
from pdkv.transfer.backends.ucx_probe import ask_ucx, resources

# as UCX 1.23 of nixl 1.5.1 writes it
PRINTED = """\
#
# UCP context
#
#     component 0  :  self
#            md 1  :  component 1  tcp
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 5  dev 2  flags -- rc_mlx5/mlx5_0:1
#      resource 3  :  md 5  dev 3  flags -s tcp/bond0.42
#
"""


def test_resources_are_found_in_what_ucx_prints() -> None:
    assert resources(PRINTED) == (
        ("self", "memory"),
        ("tcp", "eth0"),
        ("rc_mlx5", "mlx5_0:1"),
        ("tcp", "bond0.42"),
    )
    assert resources("# UCP context") == ()


def test_the_ucx_of_this_machine_answers_under_the_operators_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    facts = ask_ucx()
    assert facts.version.count(".") == 2
    assert "libucp" in facts.library
    assert ("tcp", "lo") in facts.resources
    assert "lo" in facts.devices
    assert {transport for transport, _ in facts.resources} == {"tcp", "self"}


def test_a_setting_that_leaves_no_transport_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    with pytest.raises(TransferError, match="UCX can't be used: TransferError"):
        ask_ucx()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended its process by SIGSEGV"),
        ("import sys; sys.exit('no plugin')", "can't be used: no plugin"),
        ("pass", "can't be used: no answer"),
    ],
)
def test_a_process_that_ends_otherwise_says_how(code: str, words: str) -> None:
    with pytest.raises(TransferError, match=words):
        ask_ucx((sys.executable, "-c", code))


def test_a_process_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.transfer.backends.ucx_probe.PROBE_S", 0.2)
    with pytest.raises(TransferError, match=r"within 0\.2 s"):
        ask_ucx((sys.executable, "-c", "import signal; signal.pause()"))
