"""Who acts: of several operators the one that holds a Lease.

Owns: taking, keeping and giving back the Lease. Must not: know what the leader does.

The client library's own leader election was tried on paper and left: it ends with an exception when
the API server does not answer, does not give the lease back when it stops (each upgrade would wait
for it to run out), and writes local time as if it were UTC.

As in client-go, no two clocks are compared: a lease has run out when it has not changed for its
length on *our* clock. What really keeps a second leader from doing harm is the fence of the
journals (journal.py); the Lease only keeps two operators from working against each other.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
from dataclasses import dataclass

from .client import Document, KubeClient
from .errors import LEASES, ApiError, Conflict, NotFound

LEASE_S = 10.0
"""A leader that was killed is replaced after this; training does not notice."""
RENEW_SHARE = 0.8
"""A leader that could not renew for this share of the lease stops acting."""
RETRY_SHARE = 0.2

log = logging.getLogger("holdfast.kubernetes")


@dataclass(frozen=True)
class LeaseName:
    namespace: str
    name: str


class LeaseSilence:
    """Whether the API answers one who stands by. Pure: times are arguments, in seconds."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: a shorter outage is none."""
        self._patience_s = patience_s
        self._answered_s: float | None = None
        self._error = ""

    def answered(self, now_s: float) -> None:
        self._answered_s, self._error = now_s, ""

    def failed(self, error: str) -> None:
        self._error = error

    def problem(self, now_s: float) -> str:
        """Why the lease could not be taken over; empty: as far as anybody knows, it could."""
        if self._answered_s is None:
            what = self._error or "not asked for yet"
        elif now_s - self._answered_s < self._patience_s:
            return ""
        else:
            what = self._error or f"no answer for {now_s - self._answered_s:.0f} s"
        return f"the lease cannot be had: {what}"


class LeaderElection:
    """One candidate. `await acquire()`, act until `await keep()` returns, `await release()`."""

    def __init__(
        self, cluster: KubeClient, lease: LeaseName, identity: str, lease_s: float = LEASE_S
    ) -> None:
        self._cluster, self._lease, self._identity = cluster, lease, identity
        self._lease_s = lease_s
        self._seen: tuple[str, str] | None = None
        """(holder, renewTime) when it last changed, and when that was, on our clock."""
        self._seen_at = 0.0
        self.holder = ""
        """As far as we know."""
        self._ours: Document | None = None
        """As we have written it last; None: it has to be looked at before it is written again."""
        # Who leads lives through outages that are shorter than the lease, too.
        self._silence = LeaseSilence(lease_s)

    @property
    def problem(self) -> str:
        """Why it could not lead; empty: it could, or does. That another one leads is none."""
        return "" if self.leading else self._silence.problem(asyncio.get_running_loop().time())

    @property
    def leading(self) -> bool:
        return self.holder == self._identity

    async def acquire(self) -> None:
        """Until we lead. Errors of the API are waited out."""
        while True:
            try:
                if await self._ask():
                    log.info("leading as %s", self._identity)
                    return
            except ApiError as error:
                log.warning("the lease cannot be had: %s", error)
            await asyncio.sleep(self._retry_s())

    async def keep(self) -> str:
        """Renew, until that fails for too long or somebody else leads; returns why."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        problem = ""
        while loop.time() - renewed < RENEW_SHARE * self._lease_s:
            await asyncio.sleep(self._retry_s())
            began = loop.time()
            try:
                left_s = max(0.1, RENEW_SHARE * self._lease_s - (began - renewed))
                async with asyncio.timeout(left_s):
                    if not await self._ask():
                        return f"{self.holder} has the lease"
                renewed = began
            except (ApiError, TimeoutError) as error:
                problem = str(error) or "no answer in time"
                log.warning("the lease was not renewed: %s", problem)
        self.holder = ""
        return f"the lease could not be renewed for {RENEW_SHARE * self._lease_s:g} s ({problem})"

    async def release(self) -> None:
        """Give it back, so that the next one need not wait for it to run out."""
        if not self.leading:
            return
        try:
            found = await self._cluster.get(LEASES, self._lease.namespace, self._lease.name)
            if found["spec"].get("holderIdentity") == self._identity:
                found["spec"]["holderIdentity"] = ""
                found["spec"]["leaseDurationSeconds"] = 1
                await self._cluster.replace(LEASES, self._lease.namespace, found)
        except ApiError as error:
            log.warning("the lease was not given back: %s", error)
        self.holder = ""

    def _retry_s(self) -> float:
        return RETRY_SHARE * self._lease_s * (0.8 + 0.4 * random.random())

    async def _ask(self) -> bool:
        """`_try`, and remember whether there was an answer."""
        try:
            ours = await self._try()
        except ApiError as error:
            self._silence.failed(str(error))
            raise
        self._silence.answered(asyncio.get_running_loop().time())
        return ours

    async def _try(self) -> bool:
        """Take or renew it; False: another one has it."""
        if await self._again():
            return True
        namespace, name = self._lease.namespace, self._lease.name
        now = asyncio.get_running_loop().time()
        found = await self._cluster.find(LEASES, namespace, name)
        try:
            if found is None:
                await self._cluster.create(LEASES, namespace, self._document({}, 0, _now()))
                self.holder = self._identity
                return True
            spec: Document = found.get("spec") or {}
            holder = str(spec.get("holderIdentity") or "")
            state = (holder, str(spec.get("renewTime") or ""))
            if state != self._seen:
                self._seen, self._seen_at = state, now
            if holder and holder != self._identity:
                length_s = float(spec.get("leaseDurationSeconds") or self._lease_s)
                if now - self._seen_at < length_s:
                    self.holder = holder
                    return False
            changes = int(spec.get("leaseTransitions") or 0)
            acquired = str(spec.get("acquireTime") or _now())
            if holder != self._identity:
                changes, acquired = changes + 1, _now()
            body = self._document(found["metadata"], changes, acquired)
            self._ours = await self._cluster.replace(LEASES, namespace, body)
        except Conflict:
            self.holder = ""
            return False
        self.holder = self._identity
        return True

    async def _again(self) -> bool:
        """Renew what we have written last, without looking. False: it is another one now, because
        somebody else leads, has edited it, or because the answer to a write of ours was lost."""
        ours, self._ours = self._ours, None
        if ours is None or not self.leading:
            return False
        spec = ours["spec"]
        body = self._document(ours["metadata"], spec["leaseTransitions"], spec["acquireTime"])
        try:
            self._ours = await self._cluster.replace(LEASES, self._lease.namespace, body)
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
    """MicroTime, as the API has it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
