"""What a job's parts prove to each other that they belong together: a Secret per job.

Owns: the Secret `<job>-agents` with a token and a self-signed certificate, made once per job. Must
not: speak TLS (protocol.tls does), or log what is in it.

There is no authority that signs: all parts of a job hold the same key and trust that certificate
only, so nothing has to be handed out, revoked or renewed beside it. It is valid for as long as any
job may live; it goes with the job, as the Secret does.
"""

from __future__ import annotations

import base64
import datetime
import secrets
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ...protocol import limits, tls
from ...protocol.errors import HoldfastError
from . import names
from .client import Cluster, Document
from .errors import SECRETS, Conflict
from .pods import Owner

VALID_DAYS = 3650
BACKDATED = datetime.timedelta(hours=1)
"""Clocks of nodes differ."""
TOKEN = "token"


class KeysUnusable(HoldfastError):
    """The Secret belongs to somebody else, or was edited."""


@dataclass(frozen=True)
class Keys:
    """Shows nothing of itself in logs."""

    token: str
    certificate: bytes
    """PEM."""
    key: bytes
    """PEM."""

    def __repr__(self) -> str:
        return "Keys(...)"


def make_keys(tls_name: str) -> Keys:
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
    return Keys(
        token=secrets.token_hex(limits.TOKEN_BYTES),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


async def ensure_keys(cluster: Cluster, owner: Owner, known: Keys | None) -> tuple[Keys, bool]:
    """The job's keys, and whether the Secret had to be made. One that was deleted is made again:
    with the same content where `known` says it, so that running agents do not notice; otherwise
    with a new one, and running agents can no longer be spoken to.

    Raises KeysUnusable and the errors of the API.
    """
    name = names.secret_name(owner.name)
    found = await cluster.find(SECRETS, owner.namespace, name)
    made = False
    if found is None:
        keys = known or make_keys(names.tls_name(owner.uid))
        try:
            document = secret_document(owner, keys)
            found = await cluster.create(SECRETS, owner.namespace, document)
            made = True
        except Conflict:
            found = await cluster.get(SECRETS, owner.namespace, name)
    references = found["metadata"].get("ownerReferences") or ()
    if not any(one.get("uid") == owner.uid for one in references):
        raise KeysUnusable(
            f"Secret {owner.namespace}/{name}: belongs to something else, or to an earlier job of "
            f"this name that is being deleted; the job starts when it is gone"
        )
    data = {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    try:
        keys = Keys(data[TOKEN].decode("ascii"), data[tls.CERTIFICATE_NAME], data[tls.KEY_NAME])
    except (KeyError, ValueError):
        raise KeysUnusable(
            f"Secret {owner.namespace}/{name}: edited beyond use; delete it and it is made again "
            f"(kubectl delete secret -n {owner.namespace} {name})"
        ) from None
    return keys, made


def secret_document(owner: Owner, keys: Keys) -> Document:
    data = {
        TOKEN: keys.token.encode(),
        tls.CERTIFICATE_NAME: keys.certificate,
        tls.KEY_NAME: keys.key,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": names.secret_name(owner.name),
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name, "app.kubernetes.io/managed-by": "holdfast"},
            "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
        },
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }
