"""What becomes of a request for nodes when the API server does not make all of its pods.

Owns: these tests, against a small HTTP server; tests/e2e/kubernetes/test_operator.py has a real
quota.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from holdfast.orchestrator.backends.base import NoRoom
from holdfast.orchestrator.backends.kubernetes import pod_creation
from tests.unit.backends.kubernetes.test_backend import Seen, opened, wish
from tests.unit.kube.fake_api import FakeApi, eventually, status

BUSY = status(429, "TooManyRequests", "too many requests")
CLASH = status(
    409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "small": the object has been '
    "modified; please apply your changes to the latest version and try again",
)  # fmt: skip


async def watching(api: FakeApi, *refusals: dict[str, Any]) -> None:
    """Until nothing but pods is asked for; then these are the next answers."""
    await api.next_watch()
    api.refusals += refusals


async def settled(seen: Seen) -> None:
    """Until nothing is under way."""
    while seen.backend._tasks:
        await asyncio.wait(seen.backend._tasks)


def told(seen: Seen) -> list[str]:
    return [one.text for one in seen.backend.problems()]


@pytest.mark.parametrize(
    "refusals", [[BUSY], [CLASH, CLASH], [status(500, "InternalError", "etcd")]],
    ids=["busy", "quota-changed", "server-error"],
)  # fmt: skip
def test_a_refusal_that_passes_undoes_no_other_pod_of_the_request(
    refusals: list[dict[str, Any]],
) -> None:
    async def story() -> None:
        api = FakeApi()
        async with opened(api, {"min": 40, "max": 40}) as seen:
            await watching(api, *refusals)
            nodes = await seen.backend.request_nodes(40, ())
            assert len(nodes) == api.num_made == 40 and {*nodes} == {*api.made}
            assert told(seen) == []

    asyncio.run(story())


def test_a_pod_that_was_made_though_nobody_heard_of_it_is_asked_for_again_by_its_name() -> None:
    async def story() -> None:
        api = FakeApi(lost_answers=2)
        async with opened(api, {"min": 4, "max": 4}) as seen:
            await watching(api)
            nodes = await seen.backend.request_nodes(4, ())
            assert len(nodes) == api.num_made == 4 and {*nodes} == {*api.made}

    asyncio.run(story())


def test_a_quota_between_the_least_and_the_most_gives_as_many_nodes_as_it_has_room_for() -> None:
    async def story() -> None:
        api = FakeApi(room=3)
        async with opened(api, {"min": 2, "max": 4}) as seen:
            nodes = await seen.backend.request_nodes(4, ())
            assert len(nodes) == 3 and {*nodes} == {*api.made}
            assert "4 pods were asked for and only 3 made: " in told(seen)[0]
            with pytest.raises(NoRoom, match="1 pod was asked for and none was made: "):
                await seen.backend.request_nodes(1, ())
            assert {*nodes} == {*api.made} and api.num_made == 3
            assert await seen.backend.list_nodes() == tuple(sorted(nodes))
            api.room = 4
            (last,) = await seen.backend.request_nodes(1, ())
            assert {*nodes, last} == {*api.made} and told(seen) == []

    asyncio.run(story())


def test_nodes_that_are_here_already_count_towards_what_the_job_needs() -> None:
    async def story() -> None:
        api = FakeApi(room=2)
        async with opened(api, {"min": 2, "max": 6}) as seen:
            await seen.backend.request_nodes(2, ())
            api.room = 3
            assert len(await seen.backend.request_nodes(4, ())) == 1
            assert len(api.made) == api.num_made == 3

    asyncio.run(story())


def test_too_few_to_train_with_are_given_back_and_asked_for_anew_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[int] = []

    async def story() -> None:
        api = FakeApi(room=3)
        async with opened(api, {"min": 4, "max": 8}) as seen:
            await watching(api)
            clock = asyncio.get_running_loop()
            now_s = clock.time()
            with monkeypatch.context() as patched:
                patched.setattr(clock, "time", lambda: now_s)
                for made in (3, 6, 9):
                    with pytest.raises(NoRoom, match="8 pods were asked for and none was made"):
                        await seen.backend.request_nodes(8, ())
                    await settled(seen)
                    assert api.made == {} and api.num_made == made
                    assert await seen.backend.list_nodes() == ()
                    with pytest.raises(NoRoom) as refused:
                        await seen.backend.request_nodes(8, ())
                    assert api.num_made == made, "none is even tried"
                    (pause_s,) = re.findall(r"asking again in (\d+) s", str(refused.value))
                    said.append(int(pause_s))
                    now_s += int(pause_s) + 1

    asyncio.run(story())
    first, second, third = said
    assert 2 <= first <= 5 <= second <= 10 <= third <= 20, "half for sure, half by chance"


def test_a_server_that_stays_busy_gives_no_room_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor what it may have made."""
    monkeypatch.setattr(pod_creation, "TRY_AGAIN_S", 0.0)

    async def story() -> None:
        api = FakeApi(lost_answers=1)
        async with opened(api, {"min": 4, "max": 4}) as seen:
            await watching(api)
            with pytest.raises(NoRoom, match="4 pods were asked for and none was made"):
                await seen.backend.request_nodes(4, ())
            await settled(seen)
            assert api.made == {}

    asyncio.run(story())


class NoTime(FakeApi):
    """Deletes nothing for now."""

    busy, num_refused = True, 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.busy and request.method == "DELETE":
            self.num_refused += 1
            return web.json_response(BUSY, status=BUSY["code"])
        return await super().answer(request)


def test_what_is_given_back_goes_in_the_end_and_the_reason_is_said_at_once() -> None:
    async def story() -> None:
        api = NoTime(room=3)
        async with opened(api, {"min": 4, "max": 4}) as seen:
            await watching(api)
            with pytest.raises(NoRoom, match="4 pods were asked for and none was made"):
                await seen.backend.request_nodes(4, ())
            assert len(api.made) == 3 and "none was made" in told(seen)[0]
            await eventually(lambda: api.num_refused >= 3, "all deletions to be refused")
            api.busy = False
            await settled(seen)
            assert api.made == {}

    asyncio.run(story())


def test_another_size_does_not_wait_for_what_the_old_one_was_refused() -> None:
    async def story() -> None:
        api = FakeApi(room=3)
        async with opened(api, {"min": 4, "max": 8}) as seen:
            await watching(api)
            with pytest.raises(NoRoom):
                await seen.backend.request_nodes(8, ())
            await settled(seen)
            await seen.backend.follow(wish({"min": 2, "max": 3}))
            assert len(await seen.backend.request_nodes(3, ())) == 3
            seen.backend.withhold(60.0)
            await seen.backend.follow(wish({"min": 2, "max": 4}))
            with pytest.raises(NoRoom, match="rehearsal"):
                await seen.backend.request_nodes(1, ())

    asyncio.run(story())


def test_a_new_pod_gets_the_grace_that_the_spec_has_by_now() -> None:
    async def story() -> None:
        api = FakeApi()
        nodes = {"min": 1, "max": 4}
        async with opened(api, nodes) as seen:
            graces = {"terminationGraceSeconds": 300}
            await seen.backend.follow(wish(nodes, recovery=graces))
            (node,) = await seen.backend.request_nodes(1, ())
            assert api.made[node]["spec"]["terminationGracePeriodSeconds"] == 305

    asyncio.run(story())
