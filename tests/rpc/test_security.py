"""Key files: what is used, what is refused by name, and what stays while they change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from pdkv.errors import ConfigError
from pdkv.rpc.security import RETRY_S, KeyFiles, MutualTls, Names, PlainText, Use, security_of
from tests.certificates import EXPIRED, HOURS, NOT_YET, Authority, pem, put

CA = Authority()
USES: tuple[Use, ...] = ("serve", "dial")


def test_what_was_asked_for() -> None:
    assert security_of(insecure=True) == PlainText()
    assert security_of(ca="a", certificate="c", key="k") == MutualTls(Path("a"), Path("c"), Path("k"))


@pytest.mark.parametrize(
    ("given", "field", "way_out"),
    [
        (
            {},
            "insecure",
            "plain text where that is said (--insecure), or tls_ca, tls_certificate, tls_key for mutual TLS",
        ),
        ({"insecure": True, "key": "k"}, "insecure", "false where there is tls_key"),
        ({"ca": "a", "key": "k"}, "tls_certificate", "a PEM file: tls_ca, tls_certificate, tls_key go together"),
    ],
)
def test_neither_both_or_a_part_is_refused_with_the_way_out(
    given: dict[str, str | bool], field: str, way_out: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        security_of(**given)  # type: ignore[arg-type]
    assert (refused.value.fields["field"], refused.value.fields["allowed"]) == (field, way_out)


@pytest.mark.parametrize("use", USES)
def test_good_files_are_used_under_their_names(use: Use, tmp_path: Path) -> None:
    made = CA.files(tmp_path, "p0", "10.0.0.7", "p0.fleet", "spiffe://fleet/pdkv/p0", node="p0")
    keys = KeyFiles(made, use).newest()
    assert keys.names == Names(("p0", "p0.fleet"), ("spiffe://fleet/pdkv/p0",))
    assert (keys.ca, keys.certificate, keys.key) == tuple(p.read_bytes() for p in (made.ca, made.certificate, made.key))
    assert keys.ends.endswith("GMT")


Spoil = Callable[[MutualTls], object]


def encrypted(path: Path) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


BAD: dict[str, tuple[Spoil, str, str]] = {
    "expired": (lambda f: CA.files(f.ca.parent, "p0", hours=EXPIRED), "tls_certificate", "certificate has expired"),
    "not yet valid": (lambda f: CA.files(f.ca.parent, "p0", hours=NOT_YET), "tls_certificate", "is not yet valid"),
    "of another CA": (
        lambda f: put(f.ca, Authority().pem),
        "tls_certificate",
        "vouches for now: certificate signature",
    ),
    "of a CA of another name": (
        lambda f: put(f.ca, Authority("x").pem),
        "tls_certificate",
        "unable to get local issuer",
    ),
    "of another key": (lambda f: put(f.key, pem(Authority().key)), "tls_key", "the certificate's own key"),
    "half a certificate": (lambda f: put(f.certificate, f.certificate.read_bytes()[:300]), "tls_key", "PEM files"),
    "an empty key": (lambda f: put(f.key, b""), "tls_key", "PEM files, the key without a password"),
    "an encrypted key": (lambda f: put(f.key, encrypted(f.key)), "tls_key", "PEM files, the key without a password"),
    "no CA": (lambda f: f.ca.unlink(), "tls_ca", "a readable file"),
    "no certificate": (lambda f: f.certificate.unlink(), "tls_certificate", "a readable file"),
    "no key": (lambda f: f.key.unlink(), "tls_key", "a readable file"),
    "a CA that is none": (lambda f: put(f.ca, b"PEM"), "tls_ca", "PEM certificates of a CA"),
    "of another node": (lambda f: CA.files(f.ca.parent, "p1", "p00"), "tls_certificate", "names node p0, as DNS:p0 or"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named_at_the_start(what: str, use: Use, tmp_path: Path) -> None:
    spoil, field, words = BAD[what]
    files = CA.files(tmp_path, "p0", node="p0")
    spoil(files)
    with pytest.raises(ConfigError) as refused:
        KeyFiles(files, use)
    assert refused.value.fields["field"] == field
    assert words in str(refused.value)


@pytest.mark.parametrize("what", BAD)
def test_bad_files_never_take_the_place_of_good_ones(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, _, words = BAD[what]
    made = CA.files(tmp_path, "p0", node="p0")
    files = KeyFiles(made, "serve")
    good = files.newest()
    spoil(made)
    with caplog.at_level(logging.ERROR):
        assert [files.newest() for _ in range(3)] == [good] * 3
    assert [words in r.getMessage() and "stays in use" in r.getMessage() for r in caplog.records] == [True]
    assert words in files.complaint()
    CA.files(tmp_path, "p0", node="p0")
    assert files.newest() != good
    assert files.complaint() == ""


def test_files_are_read_when_they_change_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CA.files(tmp_path, "p0")
    files = KeyFiles(made, "dial")
    first, reads = files.newest(), []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), real(path))[1])
    assert files.newest() is first
    assert not reads
    CA.files(tmp_path, "p0", "p0.fleet")
    second = files.newest()
    assert second.names.dns == ("p0", "p0.fleet")
    assert files.newest() is second


def test_a_certificate_that_becomes_valid_without_a_change_is_found(tmp_path: Path) -> None:
    """It is the clock here that stands for the time that passes: the file is changed behind the back of its stamp."""
    now_s = 0.0
    made = CA.files(tmp_path, "p0")
    files = KeyFiles(made, "serve", now_s=lambda: now_s)
    good = files.newest()
    key = ec.generate_private_key(ec.SECP256R1())
    late, ready = (CA.sign(key, "p0", hours=hours) for hours in (NOT_YET, HOURS))
    size = max(len(late), len(ready))
    put(made.key, pem(key))
    made.certificate.write_bytes(late.ljust(size))
    stamp = made.certificate.stat()
    assert files.newest() is good
    made.certificate.write_bytes(ready.ljust(size))
    os.utime(made.certificate, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert files.newest() is good  # it was looked at a moment ago
    now_s += RETRY_S
    assert files.newest().key == pem(key)


def test_a_node_is_named_as_it_is_and_by_nothing_like_it() -> None:
    names = Names(("p0", "*.fleet"), ("spiffe://fleet/ns/pdkv/p1", "https://fleet/pdkv/p2"))
    assert names.say("p0")
    assert names.say("p1")
    for other in ("p2", "P0", "p", "", "*", "a.fleet", "ns/pdkv/p1/"):
        assert not names.say(other), other


def test_patterns_are_of_whole_names_of_either_kind() -> None:
    names = Names(("decode-3", "10-0-0-7.pods"), ("spiffe://fleet/pdkv/decode-3",))
    for pattern in ("decode-*", "decode-?", "spiffe://fleet/*", "*.pods", "decode-[0-9]"):
        assert names.match(("nobody", pattern)), pattern
    for pattern in ("decode", "ecode-3", "DECODE-3", "spiffe://other/*", ""):
        assert not names.match((pattern,)), pattern
    assert not names.match(())
    assert not Names().match(("?*",))
    assert str(Names()) == "no name"


def test_the_way_of_a_file_does_not_matter(tmp_path: Path) -> None:
    """Kubernetes swaps a directory's symbolic link under the paths that a pod knows."""
    for version in ("v1", "v2"):
        CA.files(tmp_path / version, "p0", version)
    link = tmp_path / "current"
    link.symlink_to("v1")
    made = CA.files(tmp_path / "v1", "p0", "v1")
    seen = KeyFiles(replace(made, **{f: link / getattr(made, f).name for f in ("ca", "certificate", "key")}), "serve")
    assert seen.newest().names.dns == ("p0", "v1")
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(link)
    assert seen.newest().names.dns == ("p0", "v2")
