"""Questions to agents: who does not answer is named, and what is asked wrongly is refused."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest

from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.rank_stacks import RankStacks
from holdfast.orchestrator.runtime.agent_server import AgentConnection
from holdfast.orchestrator.runtime.inquiries import Inquiries
from tests.unit.core.harness import Transcript

STATE = Transcript().started().state
MEMBERS = STATE.group.members
Answer = Callable[[Any], wire.QuestionAnswer | None]


class Link:
    """An agent that answers at the next turn of the loop."""

    def __init__(self, answer: Answer, inquiries: Callable[[], Inquiries]) -> None:
        self._answer, self._inquiries = answer, inquiries

    def send(self, question: wire.Question) -> None:
        answer = self._answer(question)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self._inquiries().answered, answer)


def ask(verb: str, links: dict[str, Answer], **arguments: Any) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        made = {name: Link(answer, lambda: inquiries) for name, answer in links.items()}
        inquiries = Inquiries(cast(dict[str, AgentConnection], made), timeout_s=0.05)
        reply = await getattr(inquiries, verb)(STATE, arguments)
        assert reply.ok and reply.detail
        return cast(dict[str, Any], reply.body)

    return asyncio.run(scenario())


def shows(question: wire.ShowStacks) -> wire.StacksShown:
    entry = RankStacks(question.ranks, ("step (train.py:3)",))
    return wire.StacksShown(question=question.question, stacks=(entry,))


def test_the_stacks_of_all_nodes_are_folded() -> None:
    body = ask("stacks", dict.fromkeys(MEMBERS, shows))
    assert body["world_size"] == 2 * len(MEMBERS) and body["unanswered"] == []
    (entry,) = body["stacks"]
    assert list(entry["ranks"]) == list(range(body["world_size"]))


def test_ranks_that_do_not_answer_are_named_with_the_reason() -> None:
    def without_its_second(question: wire.ShowStacks) -> wire.StacksShown:
        return shows(wire.ShowStacks(question=question.question, generation=1, ranks=(0,)))

    first, second = MEMBERS[:2]
    body = ask("stacks", {first: without_its_second})
    whys = {one["node"]: (list(one["ranks"]), one["why"]) for one in body["unanswered"]}
    assert whys[first] == ([1], "the process has ended")
    assert whys[second] == ([2, 3], "the node is not connected")
    body = ask("stacks", {first: shows, second: lambda question: None})
    (silent,) = body["unanswered"]
    assert "did not answer within" in silent["why"]


def test_only_the_ranks_asked_for() -> None:
    body = ask("stacks", dict.fromkeys(MEMBERS, shows), ranks=[3])
    assert [list(entry["ranks"]) for entry in body["stacks"]] == [[3]]
    with pytest.raises(UserError, match="rank: got 99; expected 0 to"):
        ask("stacks", {}, ranks=[99])


def test_a_profile_comes_back_as_it_was_recorded() -> None:
    def records(question: wire.RecordProfile) -> wire.ProfileRecorded:
        assert (question.rank, question.format) == (1, "speedscope")
        return wire.ProfileRecorded(question=question.question, content=zlib.compress(b"{}"))

    body = ask("profile", {MEMBERS[0]: records}, rank=1, seconds=1, format="speedscope")
    assert zlib.decompress(base64.b64decode(body["content"])) == b"{}"


def test_a_profile_that_cannot_be_recorded_is_reported() -> None:
    def refuses(question: wire.RecordProfile) -> wire.ProfileRecorded:
        return wire.ProfileRecorded(question=question.question, problem="ptrace is not allowed")

    with pytest.raises(HoldfastError, match=r"rank 0 on .*: no profile: ptrace is not allowed"):
        ask("profile", {MEMBERS[0]: refuses}, seconds=1)
    for name, value in {"seconds": 1000, "rate": 0, "format": "raw", "rank": 77}.items():
        with pytest.raises(UserError, match=f"{name}: got"):
            ask("profile", {}, **{"seconds": 1, name: value})
