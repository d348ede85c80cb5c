"""Makes a job's token and self-signed certificate, once per job.

There is no certificate authority: all processes of a job hold the same key and trust that
certificate only, so nothing else has to be distributed, revoked or renewed. This module is apart
from tls.py because `cryptography` comes only with the extras ray and kubernetes.
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
"""Allowance for nodes whose clocks differ."""


@dataclass(frozen=True)
class TlsKeyPair:
    """Token, certificate and key of a job; its repr hides them."""

    token: str
    certificate: bytes
    """PEM."""
    key: bytes
    """PEM."""

    def __repr__(self) -> str:
        return "TlsKeyPair(...)"


def make_keys(tls_name: str) -> TlsKeyPair:
    """A new token and certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Clients check the alternative name; a common name could hold 64 characters only.
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
