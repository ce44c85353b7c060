"""TLS of the HTTP port: who gets in with what, and new files in mid-life."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession

from pdkv.rpc.security import Gate, MutualTls
from tests.certificates import HERE, Authority
from tests.http.fronts import Service, body, fronted
from tests.http.test_front import run

CA = Authority()


def context(own: MutualTls | None, trusted: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        made.load_cert_chain(own.certificate, own.key)
    return made


async def status(address: str, how: ssl.SSLContext, key: str = "") -> int:
    """0 if there is no connection to be had."""
    port = address.rpartition(":")[2]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            ClientSession() as session,
            session.post(f"https://localhost:{port}/v1/completions", json=body(), ssl=how, headers=headers) as answer,
        ):
            return answer.status
    except (ClientConnectorError, ClientError, ConnectionError):
        return 0


def test_a_client_shows_a_certificate_with_a_name_that_is_allowed(tmp_path: Path) -> None:
    own = CA.files(tmp_path / "server", "r0", *HERE)

    async def test() -> None:
        app, other = (CA.files(tmp_path / name, name) for name in ("app-1", "other"))
        stranger = Authority("strangers").files(tmp_path / "stranger", "app-2")
        async with fronted(Service(), security=own, gate=Gate(allow_names=("app-*",))) as (_, address):
            found = [await status(address, context(who, own.ca)) for who in (app, other, stranger, None)]
        assert found == [200, 403, 0, 0]

    run(test)


def test_with_keys_a_certificate_is_not_asked_for(tmp_path: Path) -> None:
    own = CA.files(tmp_path / "server", "r0", *HERE)
    (tmp_path / "keys").write_text("alpha", "utf-8")

    async def test() -> None:
        async with fronted(Service(), security=own, api_keys=str(tmp_path / "keys")) as (_, address):
            assert [await status(address, context(None, own.ca), key) for key in ("alpha", "beta", "")] == [
                200,
                401,
                401,
            ]

    run(test)


@pytest.mark.parametrize("session_reuse", [True, False])
def test_new_files_count_from_the_next_connection_on(tmp_path: Path, *, session_reuse: bool) -> None:
    own = CA.files(tmp_path / "server", "r0", *HERE)

    async def test() -> None:
        app = CA.files(tmp_path / "app", "app-1")
        async with fronted(Service(), security=own) as (_, address):
            old = context(app, own.ca)
            assert await status(address, old) == 200
            next_ca = Authority("next")
            next_ca.files(tmp_path / "server", "r0", *HERE)
            fresh = next_ca.files(tmp_path / "fresh", "app-1")
            assert await status(address, context(fresh, fresh.ca)) == 200
            # nobody comes in with a certificate of the old authority, nor with a session that began with one
            assert await status(address, old if session_reuse else context(app, own.ca)) == 0

    run(test)


def test_plain_text_is_not_answered(tmp_path: Path) -> None:
    own = CA.files(tmp_path / "server", "r0", *HERE)

    async def test() -> None:
        async with fronted(Service(), security=own) as (_, address), ClientSession() as session:
            with pytest.raises((ClientError, asyncio.TimeoutError)):
                await session.get(f"http://{address}/health")

    run(test)
