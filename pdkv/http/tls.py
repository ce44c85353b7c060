"""TLS of the HTTP port, with the files that gRPC uses.

Guarantees: every handshake has the newest files that are good; a client's certificate is checked in each of them, as no
session is ever resumed.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdkv.rpc.security import KeyFiles, Keys


def serving(files: KeyFiles, *, certificates: bool) -> ssl.SSLContext:
    """For a listening socket. `certificates`: clients have to show one; else only one that is shown is checked."""
    current = files.newest()
    context = _context(current, certificates=certificates)
    latest = context

    def newest(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current, latest
        if (keys := files.newest()) is not current:
            current, latest = keys, _context(keys, certificates=certificates)
        connection.context = latest

    context.sni_callback = newest
    return context


def _context(keys: Keys, *, certificates: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    with _as_file(keys.certificate) as certificate, _as_file(keys.key) as key:
        context.load_cert_chain(certificate, key)
    context.load_verify_locations(cadata=keys.ca.decode())
    context.verify_mode = ssl.CERT_REQUIRED if certificates else ssl.CERT_OPTIONAL
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[Path]:
    """In memory: what was checked is what is used, whatever is on disk by now."""
    number = os.memfd_create("pem")
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)
