"""Leader election of operators with a Kubernetes Lease.

The client library's leader election is not used: it ends with an exception when the API server does
not answer, does not release the lease when it stops (each upgrade would wait until it expires), and
writes local time as if it were UTC.

As in client-go, clocks of two machines are never compared: a lease has expired when it has not
changed for its duration on the local clock. Journals are fenced (journal/configmap_store.py), so a
second leader does no harm; the Lease only keeps two operators from working against each other.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .client import Document, KubeClient
from .errors import LEASES, ApiError, Conflict, NotFound, TooBusy, Unreachable

LEASE_S = 10.0
"""A killed leader is replaced after this; training continues meanwhile."""
RENEW_DEADLINE_SHARE = 0.8
"""A leader stands down when it could not renew for this share of the lease."""
RETRY_SHARE = 0.2
"""Share of the lease between two requests."""

log = logging.getLogger("holdfast.kubernetes")


@dataclass(frozen=True)
class LeaseName:
    namespace: str
    name: str


class LeaseHealth:
    """Health of the API server, seen by a standby. Pure: times are arguments, in seconds."""

    def __init__(self, outage_s: float) -> None:
        """`outage_s`: shorter outages are not reported."""
        self._outage_s = outage_s
        self._answered_s: float | None = None
        self._error = ""

    def answered(self, now_s: float) -> None:
        self._answered_s, self._error = now_s, ""

    def failed(self, error: str) -> None:
        self._error = error

    def problem(self, now_s: float) -> str:
        """Reason why the lease could not be taken over; empty while it could."""
        if self._answered_s is None:
            what = self._error or "not requested yet"
        elif now_s - self._answered_s < self._outage_s:
            return ""
        else:
            what = self._error or f"no answer for {now_s - self._answered_s:.0f} s"
        return f"the lease cannot be acquired: {what}"


class LeaderElection:
    """One candidate. `await acquire()`, act until `await keep()` returns, `await release()`."""

    def __init__(
        self, cluster: KubeClient, lease: LeaseName, identity: str, lease_s: float = LEASE_S
    ) -> None:
        self._cluster, self._lease, self._identity = cluster, lease, identity
        self._lease_s = lease_s
        self._seen: tuple[str, str] | None = None
        """(holder, renewTime) of the last change; `_seen_at_s` is its time on the local clock."""
        self._seen_at_s = 0.0
        self.holder = ""
        """The holder as last observed."""
        self._written: Document | None = None
        """The lease as this candidate has last written it; None: it must be read before the next
        write."""
        # A leader survives outages that are shorter than the lease, too.
        self._health = LeaseHealth(lease_s)

    @property
    def problem(self) -> str:
        """Reason why this candidate could not lead; empty if it could, even beside a leader."""
        return "" if self.leading else self._health.problem(asyncio.get_running_loop().time())

    @property
    def leading(self) -> bool:
        return self.holder == self._identity

    async def acquire(self) -> None:
        """Return when this candidate leads. Errors of the API are retried."""
        while True:
            try:
                if await self._try():
                    log.info("leading as %s", self._identity)
                    return
            except ApiError as error:
                log.warning("the lease cannot be acquired: %s", error)
            await asyncio.sleep(self._retry_s())

    async def keep(self, no_other_leads: Callable[[], Awaitable[bool]] | None = None) -> str:
        """Renew until that fails for too long or another candidate leads; returns the reason.

        While the API server does not answer, no candidate can take the lease. `no_other_leads` is
        asked then: true means that none has taken it in a part of the network that this candidate
        does not reach, and it remains the leader."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        limit_s = RENEW_DEADLINE_SHARE * self._lease_s
        problem = ""
        goes_on = False
        while goes_on or loop.time() - renewed < limit_s:
            await asyncio.sleep(self._retry_s())
            began = loop.time()
            try:
                left_s = max(0.1, limit_s - (began - renewed))
                async with asyncio.timeout(limit_s if goes_on else left_s):
                    if not await self._try():
                        return f"{self.holder} holds the lease"
                renewed, goes_on = began, False
            except (ApiError, TimeoutError) as error:
                problem = str(error) or "no answer in time"
                log.warning("the lease was not renewed: %s", problem)
                silent = isinstance(error, Unreachable | TooBusy | TimeoutError)
                late = loop.time() - renewed >= limit_s
                goes_on = late and silent and no_other_leads is not None and await no_other_leads()
        self.holder = ""
        return f"the lease could not be renewed for {limit_s:g} s ({problem})"

    async def release(self) -> None:
        """Release the lease, so that the next leader need not wait until it expires."""
        if not self.leading:
            return
        try:
            lease = await self._cluster.get(LEASES, self._lease.namespace, self._lease.name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                lease["spec"]["leaseDurationSeconds"] = 1
                await self._cluster.replace(LEASES, self._lease.namespace, lease)
        except ApiError as error:
            log.warning("the lease was not released: %s", error)
        self.holder = ""

    def _retry_s(self) -> float:
        return RETRY_SHARE * self._lease_s * (0.8 + 0.4 * random.random())

    async def _try(self) -> bool:
        """Acquire or renew; False when another candidate holds the lease."""
        try:
            held = await self._renew() or await self._take()
        except ApiError as error:
            self._health.failed(str(error))
            raise
        self._health.answered(asyncio.get_running_loop().time())
        return held

    async def _take(self) -> bool:
        """Read the lease and write it if it is free, expired or held by this candidate."""
        namespace, name = self._lease.namespace, self._lease.name
        now = asyncio.get_running_loop().time()
        lease = await self._cluster.find(LEASES, namespace, name)
        try:
            if lease is None:
                await self._cluster.create(LEASES, namespace, self._document({}, 0, _now()))
                self.holder = self._identity
                return True
            spec: Document = lease.get("spec") or {}
            holder = str(spec.get("holderIdentity") or "")
            state = (holder, str(spec.get("renewTime") or ""))
            if state != self._seen:
                self._seen, self._seen_at_s = state, now
            if holder and holder != self._identity:
                length_s = float(spec.get("leaseDurationSeconds") or self._lease_s)
                if now - self._seen_at_s < length_s:
                    self.holder = holder
                    return False
            transitions = int(spec.get("leaseTransitions") or 0)
            acquired = str(spec.get("acquireTime") or _now())
            if holder != self._identity:
                transitions, acquired = transitions + 1, _now()
            body = self._document(lease["metadata"], transitions, acquired)
            self._written = await self._cluster.replace(LEASES, namespace, body)
        except Conflict:
            self.holder = ""
            return False
        self.holder = self._identity
        return True

    async def _renew(self) -> bool:
        """Renew the lease as last written, without reading it. False when it has changed: another
        candidate leads, a user has edited it, or the response to a write was lost."""
        written, self._written = self._written, None
        if written is None or not self.leading:
            return False
        spec = written["spec"]
        body = self._document(written["metadata"], spec["leaseTransitions"], spec["acquireTime"])
        try:
            self._written = await self._cluster.replace(LEASES, self._lease.namespace, body)
        except (Conflict, NotFound):
            return False
        return True

    def _document(self, metadata: Document, transitions: int, acquired: str) -> Document:
        kept = {key: metadata[key] for key in ("resourceVersion",) if key in metadata}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._lease.name, "namespace": self._lease.namespace, **kept},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._lease_s)),
                "acquireTime": acquired,
                "renewTime": _now(),
                "leaseTransitions": transitions,
            },
        }


def _now() -> str:
    """The time as a MicroTime of the API."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
