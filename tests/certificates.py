"""Certificates for tests: authorities, and files of a process that tests may replace, spoil and remove."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from pdkv.rpc.security import MutualTls

HOURS = (-1.0, 1.0)
EXPIRED = (-2.0, -1.0)
NOT_YET = (1.0, 2.0)
HERE = ("localhost", "127.0.0.1")
"""Names of this host, as a certificate that others dial must have."""


def _name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass
class Authority:
    """A CA."""

    name: str = "fleet"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.certificate = self._signed(self.name, self.key, (-1.0, 1.0), [x509.BasicConstraints(True, None)])

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def sign(self, key: ec.EllipticCurvePrivateKey, *names: str, hours: tuple[float, float] = HOURS) -> bytes:
        """A certificate with these names, valid from and to so many hours from now."""
        extensions: list[x509.ExtensionType] = [x509.BasicConstraints(False, None)]
        if names:
            extensions.append(x509.SubjectAlternativeName([_name(name) for name in names]))
        return self._signed(names[0] if names else "nobody", key, hours, extensions).public_bytes(Encoding.PEM)

    def files(
        self,
        folder: Path,
        *names: str,
        hours: tuple[float, float] = HOURS,
        node: str = "",
        trusted: bytes | None = None,
    ) -> MutualTls:
        """A new key and its certificate in `folder`, in the place of what was there; `trusted`: another CA's PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        folder.mkdir(parents=True, exist_ok=True)
        made = MutualTls(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem", node)
        put(made.ca, trusted or self.pem)
        put(made.key, pem(key))
        put(made.certificate, self.sign(key, *names, hours=hours))
        return made

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        hours: tuple[float, float],
        extensions: list[x509.ExtensionType],
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(hours=hours[0]))
            .not_valid_after(now + timedelta(hours=hours[1]))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self.key, hashes.SHA256())


def put(path: Path, content: bytes) -> None:
    """Like a rotation does it: the old content until the new one is there, never a part of it."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
