"""Addresses that the operator sends a job's messages to (spec.notify).

The operator reaches servers that the pods of a job may not, so it sends only to the hosts of the
chart's notify.allowedHosts. A problem is an Event, and never in the way of the job.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.notify import Notify, is_web_address
from holdfast.orchestrator.errors import Problem
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import SECRETS, ApiError
from holdfast.orchestrator.kube.names import Owner

ANY = "*"


async def addresses(
    job: TrainingJob,
    owner: Owner,
    cluster: KubeClient,
    hosts: Sequence[str],
    note: Callable[[str], None],
) -> list[str]:
    """The address of each server; empty: it gets nothing, and `note` has got the reason."""
    return [
        await _address(f"spec.notify[{number}]", receiver, owner, cluster, hosts, note)
        for number, receiver in enumerate(job.spec.notify)
    ]


async def _address(
    field: str,
    wanted: Notify,
    owner: Owner,
    cluster: KubeClient,
    hosts: Sequence[str],
    note: Callable[[str], None],
) -> str:
    url, secret = wanted.url or "", wanted.secret
    if secret is not None:
        field, where = f"{field}.secret", f"key {secret.key} of {secret.name}"
        try:
            document = await cluster.find(SECRETS, owner.namespace, secret.name) or {}
        except ApiError as error:
            note(f"{field}: {where} cannot be read, so nothing is sent: {error}")
            return ""
        encoded = (document.get("data") or {}).get(secret.key, "")
        url = base64.b64decode(encoded).decode(errors="replace").strip()
        if not is_web_address(url):
            expected = f"a Secret of namespace {owner.namespace} with a URL in that key"
            note(str(Problem(field, where, expected, "nothing is sent until a restart")))
            return ""
    if ANY not in hosts and urlsplit(url).hostname not in hosts:
        expected = f"a host of notify.allowedHosts of the chart ({', '.join(hosts) or 'none'})"
        note(str(Problem(field, "another host", expected, "have it added; nothing is sent")))
        return ""
    return url
