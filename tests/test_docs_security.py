"""What docs/security.md says to type makes certificates that a fleet can use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pdkv.config import PrefillConfig, RouterConfig
from pdkv.errors import ConfigError
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import KeyFiles, MutualTls, Names
from pdkv.rpc.server import Services
from tests.rpc import samples
from tests.rpc.fakes import FakePrefill, run
from tests.rpc.tls import served

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def files(folder: Path, name: str, node: str = "") -> MutualTls:
    return MutualTls(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key", node)


def test_they_are_good_on_both_sides_and_have_the_names(made: Path) -> None:
    for name in ("prefill-0", "decode-0"):
        for use in ("serve", "dial"):
            assert KeyFiles(files(made, name, name), use).newest().names.say(name)  # type: ignore[arg-type]
    assert KeyFiles(files(made, "decode-0"), "dial").newest().names.uris == ("spiffe://fleet/pdkv/decode-0",)
    assert KeyFiles(files(made, "me"), "dial").newest().names == Names(("me",))
    with pytest.raises(ConfigError, match="names node me"):
        KeyFiles(files(made, "decode-0", "me"), "serve")


def test_a_server_and_a_client_with_them_meet(made: Path) -> None:
    async def body() -> None:
        async with served(files(made, "prefill-0"), Services(FakePrefill())) as server:
            directory = GrpcDirectory(files(made, "me"))
            assert (await directory.peer(server.address).status()) == samples.status("prefill")
            await directory.close()

    run(body)


def test_flags_and_limits_are_those_of_the_page() -> None:
    page = PAGE.read_text("utf-8")
    config = PrefillConfig(node_id="prefill-0")
    assert f"`--calls-per-peer` {config.calls_per_peer:,}" in page
    assert f"`--leases-per-peer` {config.leases_per_peer:,}" in page
    assert f"`--connections-per-peer` {config.connections_per_peer:,}" in page
    assert f"`--connections` {config.connections:,}" in page
    for flag in set(re.findall(r"--((?:tls|allow|calls|leases|connections|insecure|events)[a-z-]*)", page)):
        assert flag.replace("-", "_") in {*PrefillConfig.model_fields, *RouterConfig.model_fields}, flag
