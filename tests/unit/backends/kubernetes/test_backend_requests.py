"""Requests for nodes when the API server creates not all pods; tests/e2e has a real quota."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from holdfast.orchestrator.backends.base import NoRoom
from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import PodTiming
from tests.unit.backends.kubernetes.test_backend import OpenBackend, opened, training_job
from tests.unit.kube.fake_api import FakeApi, eventually, status

BUSY = status(429, "TooManyRequests", "too many requests")
CLASH = status(
    409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "small": the object has been '
    "modified; please apply your changes to the latest version and try again",
)  # fmt: skip


async def refuse_next(api: FakeApi, *refusals: dict[str, Any]) -> None:
    """Refuse the next requests once the watch is open."""
    await api.next_watch()
    api.refusals += refusals


async def settled(seen: OpenBackend) -> None:
    """Wait until the backend has no tasks."""
    while seen.backend._tasks:
        await asyncio.wait(seen.backend._tasks)


def problems(seen: OpenBackend) -> list[str]:
    return [one.text for one in seen.backend.problems()]


@pytest.mark.parametrize(
    "refusals", [[BUSY], [CLASH, CLASH], [status(500, "InternalError", "etcd")]],
    ids=["busy", "quota-changed", "server-error"],
)  # fmt: skip
async def test_a_transient_refusal_undoes_no_other_pod_of_the_request(
    refusals: list[dict[str, Any]],
) -> None:
    api = FakeApi()
    async with opened(api, {"min": 40, "max": 40}) as seen:
        await refuse_next(api, *refusals)
        nodes = await seen.backend.request_nodes(40, ())
        assert len(nodes) == api.num_made == 40 and {*nodes} == {*api.made}
        assert problems(seen) == []


async def test_a_pod_whose_creation_was_not_answered_is_requested_again_by_its_name() -> None:
    api = FakeApi(lost_answers=2)
    async with opened(api, {"min": 4, "max": 4}) as seen:
        await refuse_next(api)
        nodes = await seen.backend.request_nodes(4, ())
        assert len(nodes) == api.num_made == 4 and {*nodes} == {*api.made}


async def test_a_quota_between_minimum_and_maximum_is_used_up() -> None:
    api = FakeApi(room=3)
    async with opened(api, {"min": 2, "max": 4}) as seen:
        nodes = await seen.backend.request_nodes(4, ())
        assert len(nodes) == 3 and {*nodes} == {*api.made}
        assert "4 pods were requested and only 3 created: " in problems(seen)[0]
        with pytest.raises(NoRoom, match="1 pod was requested and none was created: "):
            await seen.backend.request_nodes(1, ())
        assert {*nodes} == {*api.made} and api.num_made == 3
        assert await seen.backend.list_nodes() == tuple(sorted(nodes))
        api.room = 4
        (last,) = await seen.backend.request_nodes(1, ())
        assert {*nodes, last} == {*api.made} and problems(seen) == []


async def test_existing_nodes_count_towards_the_minimum() -> None:
    api = FakeApi(room=2)
    async with opened(api, {"min": 2, "max": 6}) as seen:
        await seen.backend.request_nodes(2, ())
        api.room = 3
        assert len(await seen.backend.request_nodes(4, ())) == 1
        assert len(api.made) == api.num_made == 3


async def test_too_few_pods_are_deleted_and_requested_again_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses_s: list[int] = []
    api = FakeApi(room=3)
    async with opened(api, {"min": 4, "max": 8}) as seen:
        await refuse_next(api)
        clock = asyncio.get_running_loop()
        now_s = clock.time()
        with monkeypatch.context() as patched:
            patched.setattr(clock, "time", lambda: now_s)
            for num_made in (3, 6, 9):
                with pytest.raises(NoRoom, match="8 pods were requested and none was created"):
                    await seen.backend.request_nodes(8, ())
                await settled(seen)
                assert api.made == {} and api.num_made == num_made
                assert await seen.backend.list_nodes() == ()
                with pytest.raises(NoRoom) as refused:
                    await seen.backend.request_nodes(8, ())
                assert api.num_made == num_made, "no request during the pause"
                (pause_s,) = re.findall(r"next attempt in (\d+) s", str(refused.value))
                pauses_s.append(int(pause_s))
                now_s += int(pause_s) + 1
    first, second, third = pauses_s
    assert 2 <= first <= 5 <= second <= 10 <= third <= 20, (
        "each between half and all of 5, 10, 20 s"
    )


async def test_pods_of_a_server_that_stays_busy_are_deleted() -> None:
    """Including those that it may have created."""
    api = FakeApi(lost_answers=1)
    async with opened(api, {"min": 4, "max": 4}, PodTiming(create_retry_s=0.0)) as seen:
        await refuse_next(api)
        with pytest.raises(NoRoom, match="4 pods were requested and none was created"):
            await seen.backend.request_nodes(4, ())
        await settled(seen)
        assert api.made == {}


class BusyApi(FakeApi):
    """Refuses deletions while `busy`."""

    busy, num_refused = True, 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.busy and request.method == "DELETE":
            self.num_refused += 1
            return web.json_response(BUSY, status=BUSY["code"])
        return await super().answer(request)


async def test_surplus_pods_are_deleted_eventually_and_the_reason_is_shown_at_once() -> None:
    api = BusyApi(room=3)
    async with opened(api, {"min": 4, "max": 4}) as seen:
        await refuse_next(api)
        with pytest.raises(NoRoom, match="4 pods were requested and none was created"):
            await seen.backend.request_nodes(4, ())
        assert len(api.made) == 3 and "none was created" in problems(seen)[0]
        await eventually(lambda: api.num_refused >= 3, "all deletions to be refused")
        api.busy = False
        await settled(seen)
        assert api.made == {}


async def test_a_new_size_does_not_wait_for_the_refusal_of_the_old_one() -> None:
    api = FakeApi(room=3)
    async with opened(api, {"min": 4, "max": 8}) as seen:
        await refuse_next(api)
        with pytest.raises(NoRoom):
            await seen.backend.request_nodes(8, ())
        await settled(seen)
        await seen.backend.follow(training_job({"min": 2, "max": 3}))
        assert len(await seen.backend.request_nodes(3, ())) == 3
        seen.backend.withhold(60.0)
        await seen.backend.follow(training_job({"min": 2, "max": 4}))
        with pytest.raises(NoRoom, match="fault injection"):
            await seen.backend.request_nodes(1, ())


async def test_a_new_pod_gets_the_current_grace_of_the_spec() -> None:
    api = FakeApi()
    nodes = {"min": 1, "max": 4}
    async with opened(api, nodes) as seen:
        graces = {"terminationGraceSeconds": 300}
        await seen.backend.follow(training_job(nodes, recovery=graces))
        (node,) = await seen.backend.request_nodes(1, ())
        assert api.made[node]["spec"]["terminationGracePeriodSeconds"] == 305
