"""A rank that works longer than its peers is named within 20 steps; chance names none."""

from __future__ import annotations

import random
from collections import deque
from statistics import median

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import AnyEvent, FromNode, StragglerDetected
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.core.stragglers import Slow, StragglerFinder, slow_ranks
from holdfast.orchestrator.protocol.facts import Gpu, WorkerBeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import Heartbeat, NodeJoined

from .harness import SECOND, Transcript, facts, spec

RANKS = 8
KINDS = dict.fromkeys(range(RANKS), 0)
NODE_OF = {rank: f"node-{rank // 2}" for rank in range(RANKS)}
NOISE = 0.05
"""Standard deviation of a step's working time; one step in 200 takes three times as long."""


class Ranks:
    """The working times that ranks report: medians over their last steps."""

    def __init__(self, seed: int, slow_from: int | None = None, noise: float = NOISE) -> None:
        self.random = random.Random(seed)
        self.noise, self.slow_from = noise, slow_from
        self.recent = [deque[float](maxlen=limits.STRAGGLER_WINDOW) for _ in range(RANKS)]
        self.finder = StragglerFinder()

    def step(self, step: int) -> list[Slow]:
        for rank, recent in enumerate(self.recent):
            work_s = 0.1 * max(0.2, self.random.gauss(1.0, self.noise))
            if self.random.random() < 0.005:
                work_s *= 3
            if rank == 3 and self.slow_from is not None and step >= self.slow_from:
                work_s *= 1.3
            recent.append(work_s)
        full = len(self.recent[0]) == limits.STRAGGLER_WINDOW
        reports = {rank: median(r) if full else 0.0 for rank, r in enumerate(self.recent)}
        return self.finder.observe(step, reports, KINDS, NODE_OF)


def test_at_most_one_name_in_a_hundred_thousand_clean_steps_is_false() -> None:
    ranks = Ranks(seed=1)
    names = [slow for step in range(100_000) for slow in ranks.step(step)]
    assert len(names) <= 1


@pytest.mark.parametrize("seed", range(60))
def test_a_rank_that_becomes_a_third_slower_is_named_within_twenty_steps(seed: int) -> None:
    ranks = Ranks(seed, slow_from=50)
    named = {slow.rank: step for step in range(70) for slow in ranks.step(step)}
    assert list(named) == [3]
    assert 50 < named[3] <= 50 + 20


def test_noise_raises_the_limit_instead_of_naming_ranks() -> None:
    ranks = Ranks(seed=2, noise=0.25)
    assert len([slow for step in range(20_000) for slow in ranks.step(step)]) <= 2


def test_a_few_ranks_are_compared_with_the_others_and_an_unreported_one_with_none() -> None:
    one_node = dict.fromkeys(range(4), "a")
    assert list(slow_ranks({0: 0.1, 1: 0.13}, one_node)) == [1]
    assert not slow_ranks({0: 0.1, 1: 0.12}, one_node) and not slow_ranks({0: 0.1}, one_node)
    assert not slow_ranks({0: 0.1, 1: 0.0, 2: 0.5}, one_node)


def test_a_rank_exactly_at_the_limit_is_not_slow_and_four_others_show_their_spread() -> None:
    one_node = dict.fromkeys(range(8), "a")
    few = 1 + limits.STRAGGLER_SHARE_FEW
    assert not slow_ranks({0: 1.0, 1: few}, one_node)
    assert list(slow_ranks({0: 1.0, 1: few + 0.01}, one_node)) == [1]
    assert list(slow_ranks({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: few}, one_node)) == [4]
    assert not slow_ranks({0: 1.0, 1: 1.0, 2: 1.0, 3: few}, one_node)


@pytest.mark.parametrize(("nodes", "usual_s"), [(7, 1.0), (8, 1.05)])
def test_from_eight_nodes_on_all_ranks_decide_what_is_usual(nodes: int, usual_s: float) -> None:
    work_s = dict(enumerate([9.0, 1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.1][:nodes]))
    found = slow_ranks(work_s, {rank: f"node-{rank}" for rank in work_s})
    assert list(found) == [0] and found[0].usual_s == pytest.approx(usual_s)


def test_a_rank_is_named_after_enough_steps_in_a_row_and_once() -> None:
    finder = StragglerFinder()
    one_node = {0: "a", 1: "a"}

    def named(step: int, work_s: float) -> list[int]:
        found = finder.observe(step, {0: 1.0, 1: work_s}, {0: 0, 1: 0}, one_node)
        return [slow.rank for slow in found]

    assert named(0, 2.0) == [] and named(limits.STRAGGLER_STEPS - 1, 2.0) == []
    assert named(limits.STRAGGLER_STEPS, 1.0) == [], "it is as quick as the other again"
    begin = 10
    assert named(begin, 2.0) == [] and named(begin + limits.STRAGGLER_STEPS - 1, 2.0) == []
    assert named(begin + limits.STRAGGLER_STEPS, 2.0) == [1]
    assert named(begin + limits.STRAGGLER_STEPS + 1, 2.0) == []


@pytest.mark.parametrize("nodes", [2, 3, 16])
def test_all_ranks_of_a_slow_machine_are_slow(nodes: int) -> None:
    node_of = {rank: f"node-{rank // 4}" for rank in range(4 * nodes)}
    work_s = {rank: (0.13 if node == "node-1" else 0.1) for rank, node in node_of.items()}
    assert list(slow_ranks(work_s, node_of)) == [4, 5, 6, 7]


def test_the_stages_of_a_pipeline_have_different_work() -> None:
    mesh = Mesh(pipeline=2, replicate=4)
    stages = {rank: mesh.coordinates(rank)["pipeline"] for rank in range(8)}
    work_s = {rank: 0.1 if stages[rank] == stages[0] else 0.3 for rank in range(8)}
    finder = StragglerFinder()
    assert [slow for step in range(20) for slow in finder.observe(step, work_s, stages, {})] == []


def heartbeats(step: int, pressure: float, gpus: bool = False) -> list[FromNode]:
    """Node b takes 1.5 times as long as node a."""
    name = "probe_s" if gpus else "work_s"
    return [
        FromNode(node, Heartbeat(
            generation=1,
            cpu_pressure=pressure,
            workers=tuple(
                WorkerBeat(
                    rank=rank, phase="train", step=step, ticks=step + 2, step_s=0.5,
                    **{name: 0.3 if node == "b" else 0.2},
                )
                for rank in ranks
            ),
        ))
        for node, ranks in (("a", (0, 1)), ("b", (2, 3)))
    ]  # fmt: skip


def run(
    spares: tuple[str, ...], *, replace: bool, pressure: float = 0.0, gpus: tuple[str, ...] = ()
) -> tuple[Transcript, list[AnyEvent]]:
    """`gpus`: the models of nodes a and b."""
    document = spec(
        {"min": 1, "max": 2, "spares": len(spares)}, recovery={"replaceStragglers": replace}
    )
    job = Transcript(document).started("a", "b", step=None)
    job.join(*spares)
    for node, model in zip(("a", "b"), gpus, strict=False):
        gpus = (Gpu(name=model, memory_bytes=1),) * 2
        job.state.nodes.change(node, facts=facts(node, gpus=gpus))
    monitor = ProgressMonitor(job.state.job, job.controller)
    found: list[AnyEvent] = []
    for node in ("a", "b"):
        monitor.observe(job.now_ns, FromNode(node, NodeJoined(facts=facts(node), generation=1)))
    for step in range(12):
        job.now_ns += SECOND // 2
        for beat in heartbeats(step, pressure, bool(gpus)):
            for event in monitor.observe(job.now_ns, beat):
                found.append(event)
                job.apply(event)
    return job, found


def test_a_straggler_is_noted_and_only_replaced_by_a_spare_if_the_job_wants_it() -> None:
    job, found = run(("c",), replace=False)
    slow = [event for event in found if isinstance(event, StragglerDetected)]
    assert {event.node for event in slow} == {"b"}
    assert "300.0 ms a step outside collectives, 1.50 times as long" in slow[0].evidence
    assert job.state.stop is None and not job.state.nodes["b"].preempting
    job, _found = run((), replace=True)
    assert job.state.stop is None
    assert any("b is not replaced: there is no spare" in text for _at, text in job.state.notes)


def test_a_spare_takes_the_ranks_of_a_straggler() -> None:
    job, _found = run(("c",), replace=True)
    assert job.state.nodes["b"].slow
    for _ in range(20):
        if job.state.stop is not None:
            break
        job.wait(1.0)
    assert job.state.stop is not None and job.state.stop.purpose == "preemption"
    assert job.state.reason.text.startswith("b will be replaced (it is slow: rank ")
    for node in ("a", "b"):
        job.stopped(node, 11)
    launched = [one.node for one in job.actions if isinstance(one, LaunchGroup)]
    assert set(launched[-2:]) == {"a", "c"}
    assert job.state.incidents[-1].title == "b is slow and replaced"


def test_no_rank_of_a_machine_whose_threads_share_cores_is_named() -> None:
    _job, found = run((), replace=False, pressure=0.4)
    assert not [event for event in found if isinstance(event, StragglerDetected)]


def test_a_slow_gpu_is_named_by_its_probes_also_on_a_machine_whose_threads_share_cores() -> None:
    job, found = run(("c",), replace=True, pressure=0.4, gpus=("H100", "H100"))
    slow = [event for event in found if isinstance(event, StragglerDetected)]
    assert {event.node for event in slow} == {"b"} and job.state.nodes["b"].slow
    assert slow[0].evidence == (
        "the GPU of rank 2 takes 300.00 ms for the matrix products that measure its speed, 1.50 "
        "times as long as the other ranks (200.00 ms)"
    )


def test_gpus_of_two_models_are_not_compared() -> None:
    _job, found = run(("c",), replace=True, gpus=("H100", "A100"))
    assert not [event for event in found if isinstance(event, StragglerDetected)]
