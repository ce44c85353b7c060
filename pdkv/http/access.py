"""Who may ask over HTTP, and how much one of them at once.

Guarantees: with a file of keys nobody is served without one of them; under mutual TLS without such a file nobody whose
certificate has no name that is allowed; refusals never repeat a key, and take no longer for one that is nearly right.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, KeyRefused, LimitReached, NotAuthorised
from pdkv.rpc.security import Gate, Names

log = logging.getLogger(__name__)


class ApiKeys:
    """One a line in a file; empty lines and those that begin with # are none. Changes are seen by the next request."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file without a key."""
        self._path = path
        self._stamp = self._looked()
        self._keys = self._read()

    def caller(self, given: str) -> str | None:
        """Name of whoever has this key; None if nobody has."""
        if (stamp := self._looked()) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = self._read()
            except ConfigError as error:
                log.error("the keys that were there before stay in use: %s", error)
        digest = hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()
        return f"key {digest[:8]}" if digest in self._keys else None

    def _looked(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> frozenset[str]:
        """Their digests: looking one up tells nothing about another."""
        try:
            lines = [line.strip() for line in self._path.read_text("utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError("http_api_keys", str(self._path), f"a readable text file ({error})") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError("http_api_keys", str(self._path), "a file with a key in it")
        return frozenset(hashlib.sha256(key.encode()).hexdigest() for key in keys)


class Access:
    def __init__(self, gate: Gate, keys: ApiKeys | None) -> None:
        self._gate = gate
        self._keys = keys
        self._running: Counter[str] = Counter()

    @contextmanager
    def let_in(self, headers: Mapping[str, str], certificate: Mapping[str, Any] | None, address: str) -> Iterator[None]:
        """For as long as the request runs; `certificate` as Python shows it. Raises `KeyRefused`, `NotAuthorised`,
        `LimitReached`."""
        caller = self._caller(headers.get("Authorization", ""), certificate, address)
        if self._running[caller] >= self._gate.calls_per_peer:
            limit = self._gate.calls_per_peer
            words = f"{caller} has {limit} requests that run; one caller may have {limit} at once"
            raise LimitReached(words, peer=caller, calls_per_peer=limit)
        self._running[caller] += 1
        try:
            yield
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    def _caller(self, authorization: str, certificate: Mapping[str, Any] | None, address: str) -> str:
        if self._keys is not None:
            scheme, _, given = authorization.partition(" ")
            caller = self._keys.caller(given.strip()) if scheme.lower() == "bearer" else None
            if caller is None:
                raise KeyRefused("no key, or none that is known here: Authorization: Bearer KEY")
            return caller
        if certificate is None:
            return address
        names = names_of(certificate)
        patterns = self._gate.allow_names
        if patterns and not names.match(patterns):
            allowed = ", ".join(patterns)
            raise NotAuthorised(f"{names} may not ask here; allowed: {allowed}", names=names, allowed=allowed)
        return str(names)


def names_of(certificate: Mapping[str, Any]) -> Names:
    said = certificate.get("subjectAltName", ())
    dns, uris = (tuple(value for kind, value in said if kind == wanted) for wanted in ("DNS", "URI"))
    return Names(dns, uris)
