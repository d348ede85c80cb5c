"""What a job's parts prove to each other that they belong together: a Secret per job.

Owns: the Secret `<job>-agents` with a token and a self-signed certificate, made once per job. Must
not: speak TLS (protocol.tls does), or log what is in it.

There is no authority that signs: all parts of a job hold the same key and trust that certificate
only, so nothing has to be handed out, revoked or renewed beside it. It is valid for as long as any
job may live; it goes with the job, as the Secret does.
"""

from __future__ import annotations

import base64

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import SECRETS, Conflict
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.certificate import TlsKeyPair, make_keys

__all__ = ["KeysUnusable", "TlsKeyPair", "ensure_keys", "make_keys", "secret_document"]

TOKEN = "token"


class KeysUnusable(HoldfastError):
    """The Secret belongs to somebody else, or was edited."""


async def ensure_keys(
    cluster: KubeClient, owner: Owner, known: TlsKeyPair | None, *, fresh: bool = False
) -> tuple[TlsKeyPair, bool]:
    """The job's keys, and whether the Secret had to be made. One that was deleted is made again:
    with the same content where `known` says it, so that running agents do not notice; otherwise
    with a new one, and running agents can no longer be spoken to. `fresh`: most likely there is
    none yet, so it is not asked for before.

    One that was edited is not written over: we may not, and somebody may have meant it.

    Raises KeysUnusable and the errors of the API.
    """
    name = names.secret_name(owner.name)
    found = None if fresh else await cluster.find(SECRETS, owner.namespace, name)
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
    held = _keys_in(found)
    if held is None or (known is not None and held != known):
        what = "edited beyond use" if held is None else "edited, running agents have other keys"
        raise KeysUnusable(
            f"Secret {owner.namespace}/{name}: {what}; delete it and it is made again "
            f"(kubectl delete secret -n {owner.namespace} {name})"
        )
    return held, made


def _keys_in(secret: Document) -> TlsKeyPair | None:
    """None: nobody can speak with what is in it."""
    try:
        data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        keys = TlsKeyPair(
            data[TOKEN].decode("ascii"), data[tls.CERTIFICATE_NAME], data[tls.KEY_NAME]
        )
        tls.server_context_from_pem(keys.certificate, keys.key)
    except (KeyError, ValueError, tls.TlsUnusable):
        return None
    return keys


def secret_document(owner: Owner, keys: TlsKeyPair) -> Document:
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
