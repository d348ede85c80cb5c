"""Makes what the parts of one job prove to each other that they belong together.

Owns: a job's token and its self-signed certificate, made once per job. Must not: speak TLS (tls.py
does), store or log what it makes. `cryptography` is imported only here; the extras that run jobs
over a network bring it along.

There is no authority that signs: all parts of a job hold the same key and trust that certificate
only, so nothing has to be handed out, revoked or renewed beside it.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .. import limits

VALID_DAYS = 3650
BACKDATED = datetime.timedelta(hours=1)
"""Clocks of nodes differ."""


@dataclass(frozen=True)
class TlsKeyPair:
    """Shows nothing of itself in logs."""

    token: str
    certificate: bytes
    """PEM."""
    key: bytes
    """PEM."""

    def __repr__(self) -> str:
        return "Keys(...)"


def make_keys(tls_name: str) -> TlsKeyPair:
    """A fresh token and certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name may have 64 characters; what counts is the alternative name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast job")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return TlsKeyPair(
        token=secrets.token_hex(limits.TOKEN_BYTES),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
