"""Questions of users about running workers: each goes to an agent, which answers once.

Questions are not events: no decision depends on an answer, and none is in the journal.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .. import limits
from ..core.state import JobState
from ..errors import HoldfastError, UserError
from ..protocol import messages as wire
from ..protocol.rank_stacks import RankStacks, fold, within
from .agent_server import AgentConnection

FORMATS = ("flamegraph", "speedscope")


class Unanswered(msgspec.Struct, frozen=True):
    """Ranks of which nothing is known."""

    node: str
    ranks: tuple[int, ...]
    why: str


class Inquiries:
    """Questions to the workers of one job."""

    def __init__(
        self, links: Mapping[str, AgentConnection], timeout_s: float = limits.QUESTION_TIMEOUT_S
    ) -> None:
        self._links, self._timeout_s = links, timeout_s
        self._waiting: dict[int, asyncio.Future[wire.QuestionAnswer]] = {}

    def answered(self, message: wire.QuestionAnswer) -> None:
        """An agent has answered; too late, or a question of an earlier controller: ignored."""
        waiting = self._waiting.get(message.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _ask(
        self, node: str, make: Callable[[int], wire.Question], timeout_s: float
    ) -> wire.QuestionAnswer | str:
        """The answer, or why there is none."""
        link = self._links.get(node)
        if link is None:
            return "the node is not connected"
        number = secrets.randbits(48)
        waiting: asyncio.Future[wire.QuestionAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            link.send(make(number))
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            return f"its agent did not answer within {timeout_s:g} s"
        finally:
            del self._waiting[number]

    # -- stacks --------------------------------------------------------------------------------
    async def stacks(self, state: JobState, arguments: dict[str, Any]) -> wire.Reply:
        """`ranks`: a list; without it the first limits.MAX_SHOWN_RANKS, with `all` all ranks."""
        size, generation = num_running(state), state.generation
        ranks = _ranks(arguments, size)
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(state.node_of(rank), []).append(rank)
        answers = await asyncio.gather(
            *(self._node_stacks(node, generation, of) for node, of in by_node.items())
        )
        stacks = fold(entry for shown, _missing in answers for entry in shown)
        kept, cut = within(stacks, limits.MAX_ANSWER_BYTES)
        body = {
            "generation": generation,
            "world_size": size,
            "stacks": msgspec.to_builtins(kept),
            "unanswered": msgspec.to_builtins([item for _shown, none in answers for item in none]),
            "not_asked": size - len(ranks) if not arguments.get("ranks") else 0,
            "left_out": cut,
        }
        num_shown = sum(len(entry.ranks) for entry in stacks)
        detail = f"{num_shown} of {len(ranks)} ranks answered, {len(stacks)} different stacks"
        return wire.Reply(ok=True, detail=detail, body=body)

    async def _node_stacks(
        self, node: str, generation: int, ranks: list[int]
    ) -> tuple[tuple[RankStacks, ...], list[Unanswered]]:
        asked = tuple(ranks)
        answer = await self._ask(
            node,
            lambda number: wire.ShowStacks(question=number, generation=generation, ranks=asked),
            self._timeout_s,
        )
        if not isinstance(answer, wire.StacksShown):
            return (), [Unanswered(node, asked, str(answer))]
        shown = {rank for entry in answer.stacks for rank in entry.ranks}
        ended = tuple(rank for rank in asked if rank not in shown)
        return answer.stacks, [Unanswered(node, ended, "the process has ended")] if ended else []

    # -- profiles ------------------------------------------------------------------------------
    async def profile(self, state: JobState, arguments: dict[str, Any]) -> wire.Reply:
        """`seconds`, `rate`, `format`, `idle` of one `rank`; the body has the file, compressed with
        zlib, in base64. Raises HoldfastError when there is none."""
        size, generation = num_running(state), state.generation
        rank = arguments.get("rank") or 0
        seconds = _number(arguments, "seconds", 10.0, 1, limits.MAX_PROFILE_S)
        rate = arguments.get("rate", 100)
        form, idle = arguments.get("format", FORMATS[0]), bool(arguments.get("idle"))
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise UserError.of("rank", f"{rank}", f"0 to {size - 1}")
        if not isinstance(rate, int) or not 1 <= rate <= 1000:
            raise UserError.of("rate", f"{rate}", "1 to 1000 samples per second")
        if form not in FORMATS:
            raise UserError.of("format", f"{form}", f"one of {', '.join(FORMATS)}")
        node = state.node_of(rank)
        answer = await self._ask(
            node,
            lambda number: wire.RecordProfile(
                question=number,
                generation=generation,
                rank=rank,
                seconds=float(seconds),
                rate=rate,
                format=form,
                idle=idle,
            ),
            seconds + self._timeout_s,
        )
        problem = answer.problem if isinstance(answer, wire.ProfileRecorded) else str(answer)
        if problem or not isinstance(answer, wire.ProfileRecorded):
            raise HoldfastError(f"rank {rank} on {node}: no profile: {problem}")
        content = base64.b64encode(answer.content).decode()
        body = {"rank": rank, "node": node, "generation": generation, "format": form}
        detail = f"{seconds:g} s of rank {rank} on {node}, generation {generation}"
        return wire.Reply(ok=True, detail=detail, body={**body, "content": content})


def _number(arguments: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError.of(name, f"{value}", f"{low:g} to {high:g}")
    return float(value)


def num_running(state: JobState) -> int:
    """The number of ranks. Raises UserError if none runs."""
    if state.group.membership is None or not state.group.active:
        raise UserError.of("job", f"{state.phase}, no workers", "running workers")
    return state.group.membership.world_size


def _ranks(arguments: dict[str, Any], size: int) -> list[int]:
    wanted = arguments.get("ranks")
    if not wanted:
        return list(range(size if arguments.get("all") else min(size, limits.MAX_SHOWN_RANKS)))
    for rank in wanted:
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise UserError.of("rank", f"{rank}", f"0 to {size - 1}")
    return sorted(set(wanted))
