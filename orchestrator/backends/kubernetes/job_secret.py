"""The Secret `<job>-agents`: token and TLS key pair of a job. Its content is never logged.

The certificate is self-signed: the operator and the agents of a job hold the same key and trust
only that certificate, so nothing has to be issued, revoked or renewed. It is valid for as long as
any job may live and is deleted with the job.
"""

from __future__ import annotations

import base64
import contextlib
from typing import Literal

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import SECRETS, Conflict
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.certificate import TlsKeyPair as TlsKeyPair
from holdfast.orchestrator.protocol.certificate import make_keys

TOKEN = "token"


SecretState = Literal["found", "restored", "new"]
"""The Secret exists; it was created again with its content; it was created with new keys."""


class KeysUnusable(HoldfastError):
    """The Secret has another owner or was edited."""


async def ensure_keys(
    cluster: KubeClient, owner: Owner, known: TlsKeyPair | None, *, fresh: bool = False
) -> tuple[TlsKeyPair, SecretState]:
    """The job's keys, and what had to be done for them.

    A deleted Secret is created again with the `known` content or, by an operator that knows none,
    with that of its copy, so that running agents are not affected; with new keys if both Secrets
    are gone, and then running agents are refused. An edited Secret is not overwritten: the operator
    has no right to, and the edit may be intended. `fresh`: there is probably no Secret yet, so it
    is not looked up first.

    Raises KeysUnusable and ApiError.
    """
    name = names.secret_name(owner.name)
    secret = None if fresh else await cluster.find(SECRETS, owner.namespace, name)
    state: SecretState = "found"
    if secret is None:
        keys = known
        if keys is None and not fresh:
            keys = await _copied(cluster, owner)
        is_new = keys is None
        keys = keys or make_keys(names.tls_name(owner.uid))
        try:
            document = secret_document(owner, keys)
            secret = await cluster.create(SECRETS, owner.namespace, document)
            state = "new" if is_new else "restored"
            if is_new:
                await _keep_copy(cluster, owner, keys)
        except Conflict:
            secret = await cluster.get(SECRETS, owner.namespace, name)
    if not owner.owns(secret):
        raise KeysUnusable(
            f"Secret {owner.namespace}/{name}: has another owner, or belongs to an earlier job of "
            f"this name that is being deleted; the job starts when it is gone"
        )
    held = _keys_in(secret)
    if held is None or (known is not None and held != known):
        what = "not usable" if held is None else "edited, and running agents have other keys"
        raise KeysUnusable(
            f"Secret {owner.namespace}/{name}: {what}; delete it and the operator creates it again "
            f"(kubectl delete secret -n {owner.namespace} {name})"
        )
    return held, state


async def _copied(cluster: KubeClient, owner: Owner) -> TlsKeyPair | None:
    """The keys in the copy; None: there is none of this job, or it was edited."""
    copy = await cluster.find(SECRETS, owner.namespace, names.secret_copy_name(owner.name))
    return _keys_in(copy) if copy is not None and owner.owns(copy) else None


async def _keep_copy(cluster: KubeClient, owner: Owner, keys: TlsKeyPair) -> None:
    """Keep a copy of a Secret that was just made."""
    document = secret_document(owner, keys)
    document["metadata"]["name"] = names.secret_copy_name(owner.name)
    with contextlib.suppress(Conflict):
        await cluster.create(SECRETS, owner.namespace, document)


def _keys_in(secret: Document) -> TlsKeyPair | None:
    """None when the content cannot be used for TLS."""
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
