"""With whom a process talks: in plain text with everybody, or under mutual TLS with those that our CA has named.

Guarantees: there is no third way, and neither is assumed; key files are used only after they have passed a handshake
in memory, so that a half-written, expired or not yet valid certificate, one of another CA, or one without its key is
named at the start (`ConfigError`) and never used later: the last good ones stay, and a line in the log says why; what
changed on disk is seen by the next connection.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pdkv.errors import ConfigError

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How often files that can't be used are looked at again: a certificate may become valid without a change on disk."""
FLIGHTS = 8
"""More than any handshake takes."""
TLS_AGE_S = 7200.0
"""Of a connection; then the peer connects anew and shows what certificate it has by then."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Whoever reaches a port may use it, and is believed what it says it is."""


@dataclass(frozen=True, slots=True)
class MutualTls:
    """PEM files. Both sides of a connection show a certificate of `ca`."""

    ca: Path
    certificate: Path
    """With its chain, if another than the CA itself has signed it."""
    key: Path
    node: str = ""
    """Node id that the certificate must name; empty: this process is no node."""


Security: TypeAlias = PlainText | MutualTls


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may call a server, and how much at once."""

    allow_names: tuple[str, ...] = ()
    """Patterns (`*`, `?`, `[…]`) of names in a caller's certificate; none: any certificate of the CA will do."""
    allow_status: tuple[str, ...] = ()
    """Of names that may ask for the status beside those, and do nothing else."""
    allow_admin: tuple[str, ...] = ()
    """Of names that may drain and compact; none: nobody may."""
    calls_per_peer: int = 1024
    """Calls of one peer that run at once. Under TLS a peer is a certificate's names, in plain text an IP address."""
    connections_per_peer: int = 256
    """Over which one peer's calls run at once. Idle ones count for `connections` alone: nobody has a name there yet."""
    connections: int = 1024
    """Of all peers together."""
    connection_age_s: float | None = None
    """Then a peer has to connect anew; calls go on to their end. None: under TLS after `TLS_AGE_S`, else never."""


def connection_age_s(gate: Gate, security: Security) -> float | None:
    """Of every connection to a server, whatever is spoken there; None: as long as its peer keeps it."""
    return gate.connection_age_s or (TLS_AGE_S if isinstance(security, MutualTls) else None)


def security_of(*, ca: str = "", certificate: str = "", key: str = "", insecure: bool = False) -> Security:
    """What was asked for. Raises `ConfigError` for both or neither."""
    given = {"tls_ca": ca, "tls_certificate": certificate, "tls_key": key}
    if insecure and any(given.values()):
        raise ConfigError("insecure", insecure, f"false where there is {', '.join(n for n, v in given.items() if v)}")
    if insecure:
        return PlainText()
    if not any(given.values()):
        allowed = f"plain text where that is said (--insecure), or {', '.join(given)} for mutual TLS"
        raise ConfigError("insecure", None, allowed)
    for name, value in given.items():
        if not value:
            raise ConfigError(name, value, f"a PEM file: {', '.join(given)} go together")
    return MutualTls(Path(ca), Path(certificate), Path(key))


@dataclass(frozen=True, slots=True)
class Names:
    """What a certificate calls its holder, in its subject alternative names."""

    dns: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()

    def say(self, node: str) -> bool:
        """The holder is this node: a DNS name equals its id, or a `spiffe://` one ends with `/pdkv/ID`."""
        return node in self.dns or any(u.startswith("spiffe://") and u.endswith(f"/pdkv/{node}") for u in self.uris)

    def match(self, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in (*self.dns, *self.uris) for pattern in patterns)

    def __str__(self) -> str:
        return ", ".join((*self.dns, *self.uris)) or "no name"


@dataclass(frozen=True, slots=True)
class Keys:
    """Files that were good when they were read."""

    ca: bytes
    certificate: bytes
    key: bytes
    names: Names
    ends: str
    """When the certificate does, as it says it."""


Use: TypeAlias = Literal["serve", "dial"]
Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class KeyFiles:
    """Key files of one process, for one side of its connections. Thread-safe: gRPC asks from its own threads."""

    def __init__(self, files: MutualTls, use: Use, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises `ConfigError` naming the file that can't be used."""
        self.files = files
        self._use: Use = use
        self._now_s = now_s
        self._lock = threading.Lock()
        self._good, self._keys = self._stamp(), _checked(files, use)
        self._bad: Stamp | None = None
        self._why = ""
        self._again_s = 0.0
        log.info("mutual TLS, to %s as %s until %s", use, self._keys.names, self._keys.ends)

    def newest(self) -> Keys:
        """The same object until files that can be used have taken the place of these."""
        with self._lock:
            stamp, now_s = self._stamp(), self._now_s()
            if stamp != self._good and (stamp != self._bad or now_s >= self._again_s):
                self._load(stamp, now_s)
            return self._keys

    def complaint(self) -> str:
        """What is wrong with the files now; empty if nothing is."""
        try:
            _checked(self.files, self._use)
        except ConfigError as error:
            return str(error)
        return ""

    def _load(self, stamp: Stamp, now_s: float) -> None:
        try:
            self._keys = _checked(self.files, self._use)
        except ConfigError as error:
            if str(error) != self._why:
                log.error("the certificate of %s until %s stays in use: %s", self._keys.names, self._keys.ends, error)
            self._bad, self._why, self._again_s = stamp, str(error), now_s + RETRY_S
            return
        self._good, self._bad, self._why = stamp, None, ""
        log.info("mutual TLS, to %s as %s until %s from now on", self._use, self._keys.names, self._keys.ends)

    def _stamp(self) -> Stamp:
        """Changes with the files; taken before they are read, so that a change meanwhile is seen next time."""
        return tuple(_stamp(path) for path in (self.files.ca, self.files.certificate, self.files.key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _checked(files: MutualTls, use: Use) -> Keys:
    """Raises `ConfigError`."""
    before = _read(files)
    shown = _shake_hands(files, use)
    if _read(files) != before:
        raise ConfigError("tls_certificate", str(files.certificate), "files that nobody writes to just now")
    alternatives = shown.get("subjectAltName", ())
    dns, uris = (tuple(v for kind, v in alternatives if kind == wanted) for wanted in ("DNS", "URI"))
    names = Names(dns, uris)
    if files.node and not names.say(files.node):
        allowed = f"a certificate that names node {files.node}, as DNS:{files.node} or URI:spiffe://…/pdkv/{files.node}"
        raise ConfigError("tls_certificate", f"{files.certificate} ({names})", allowed)
    return Keys(*before, names, shown["notAfter"])


def _read(files: MutualTls) -> tuple[bytes, bytes, bytes]:
    ca, certificate, key = (
        _bytes(field, path)
        for field, path in (("tls_ca", files.ca), ("tls_certificate", files.certificate), ("tls_key", files.key))
    )
    return ca, certificate, key


def _bytes(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(field, str(path), f"a readable file ({error.strerror})") from error


def _shake_hands(files: MutualTls, use: Use) -> dict[str, Any]:
    """Both ends of a handshake, the other one checking this one's certificate as a peer will; what it saw."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for own in (server, client):
        try:
            # An encrypted key is refused, not asked for a password at a terminal.
            own.load_cert_chain(files.certificate, files.key, password="")
        except OSError as error:
            mixed = "KEY_VALUES_MISMATCH" in str(error)
            allowed = "the certificate's own key" if mixed else f"PEM files, the key without a password ({error})"
            raise ConfigError("tls_key", f"{files.key} for {files.certificate}", allowed) from error
    judge = client if use == "serve" else server
    try:
        judge.load_verify_locations(files.ca)
    except OSError as error:
        raise ConfigError("tls_ca", str(files.ca), f"PEM certificates of a CA ({error})") from error
    judge.verify_mode = ssl.CERT_REQUIRED
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for _ in range(FLIGHTS):
            for end in ends:
                _step(end)
    except ssl.SSLCertVerificationError as error:
        allowed = f"one that {files.ca} vouches for now: {error.verify_message}"
        raise ConfigError("tls_certificate", str(files.certificate), allowed) from error
    except ssl.SSLError as error:
        raise ConfigError("tls_certificate", str(files.certificate), f"one to shake hands with ({error})") from error
    return dict(ends[judge is server].getpeercert() or {})


def _step(end: ssl.SSLObject) -> None:
    with suppress(ssl.SSLWantReadError):
        end.do_handshake()
