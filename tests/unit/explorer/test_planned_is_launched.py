"""The planned mesh is what the controller launches, for any job, nodes and device memory."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping
from holdfast.orchestrator.core.actions import FinishJob, LaunchGroup
from holdfast.orchestrator.core.events import FromNode
from holdfast.orchestrator.core.rank_assignment import best_size, mesh_for
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.explorer.estimate import fits
from holdfast.orchestrator.explorer.plan import make_plan
from holdfast.orchestrator.planner.choose import choose_mesh, may_fit, memory_on, num_nodes_used
from holdfast.orchestrator.planner.memory import device_bytes
from holdfast.orchestrator.planner.micro_batch import fitted_layout
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts
from holdfast.orchestrator.protocol.messages import NodeJoined

from ..core.harness import Transcript
from ..planner.builders import FACTS, make_job

CHECKPOINTING: tuple[dict[str, Any], ...] = ({}, {"selective": {}}, {"full": {}})


@st.composite
def jobs(draw: st.DrawFn) -> tuple[TrainingJob | None, NodeFacts]:
    """A job of the recipe on GPUs, None where its axes do not go together; and one of its nodes."""
    workers = draw(st.sampled_from([1, 2, 4, 8]))
    most = draw(st.integers(1, 6))
    divisors = [n for n in (1, 2, 4, 8) if workers % n == 0]
    tensor = draw(st.sampled_from(divisors))
    pipeline = draw(st.sampled_from([n for n in divisors if workers // tensor % n == 0]))
    rest = workers // tensor // pipeline
    context = draw(st.sampled_from([n for n in divisors if rest % n == 0]))
    parallelism: dict[str, Any] = {
        "shard": draw(st.sampled_from(["auto", "auto", "auto", "world", *divisors])),
        "tensor": tensor,
        "context": context,
        "activationCheckpointing": draw(st.sampled_from(CHECKPOINTING)),
    }
    if pipeline > 1:
        parallelism["pipeline"] = {"ranks": pipeline}
    elif draw(st.booleans()):
        parallelism["fsdp"] = {"reshardAfterForward": draw(st.booleans())}
    if draw(st.booleans()):
        parallelism["offload"] = "cpu"
    if parallelism["shard"] == "auto" and draw(st.booleans()):
        parallelism["replicate"] = draw(st.sampled_from([1, 2]))
    model = {
        "dim": draw(st.sampled_from([256, 2048, 8192])),
        "numLayers": draw(st.sampled_from([4, 24, 80])),
        "numHeads": 8,
        "vocabSize": 32000,
    }
    recipe = {
        "model": model,
        "globalBatch": draw(st.sampled_from([8, 64, 512])),
        "microBatch": draw(st.sampled_from(["auto", 1, 2])),
        "data": {"sequenceLength": draw(st.sampled_from([512, 4096]))},
    }
    gpu = Gpu("H100", draw(st.sampled_from([8, 24, 40, 80, 141])) * 2**30)
    main = draw(st.sampled_from([0, 64, 512, 2048])) * 2**30
    node = replace(FACTS, slots=workers, gpus=(gpu,) * workers, memory_bytes=main)
    try:
        job = make_job(
            nodes=(draw(st.integers(1, most)), most),
            workers=workers,
            recipe=recipe,
            parallelism=parallelism,
            resources={"gpu": 1},
        )
    except SpecError:
        return None, node
    return job, node


@settings(max_examples=300)
@given(jobs(), st.integers(1, 8))
def test_the_plan_of_any_nodes_has_the_mesh_of_the_controller(
    made: tuple[TrainingJob | None, NodeFacts], available: int
) -> None:
    """The controller takes the largest size with a mesh, also after nodes left or joined."""
    job, node = made
    if job is None:
        return
    memory = memory_on(job, [node])
    size = best_size(job, min(available, job.spec.nodes.max), memory)
    chosen = choose_mesh(job, available, memory)
    assert (chosen is None) == (size == 0)
    if chosen is not None:
        assert mesh_for(job, size, memory) == chosen[0]


@settings(max_examples=60)
@given(jobs())
def test_the_controller_launches_what_was_planned_or_refuses_it(
    made: tuple[TrainingJob | None, NodeFacts],
) -> None:
    job, node = made
    if job is None:
        return
    plan = make_plan(job, node)
    transcript = Transcript(job_to_mapping(job))
    transcript.submit()
    for number in range(job.spec.nodes.max):
        transcript.apply(FromNode(f"node-{number}", NodeJoined(facts=node, offered_port=40_000)))
    launched = transcript.all(LaunchGroup)
    if plan is None:
        assert not launched
        return
    memory = memory_on(job, [node])
    assert plan.estimate is not None and memory.device is not None
    work = workload_of(job)
    assert work is not None
    # What the plan shows is what would be launched, number by number.
    layout = fitted_layout(job, plan.mesh, memory.device)
    assert plan.estimate.peak_bytes == device_bytes(work, layout)
    assert plan.estimate.micro_batch == layout.micro_batch
    held = may_fit(job, plan.mesh, memory)  # and main memory what is offloaded
    assert plan.fits == (fits(plan.estimate.peak_bytes, memory.device) and held)
    if plan.num_nodes < job.spec.nodes.max:
        return  # the controller waits for the rest first
    if may_fit(job, plan.mesh, memory):
        membership = launched[-1].membership
        assert membership.mesh == plan.mesh
        assert layout_of(job, plan.mesh, membership.micro_batch) == layout
        return
    assert not launched
    ended = transcript.last(FinishJob)
    assert ended.reason.code == "does-not-fit"
    needs = f"{plan.estimate.peak_bytes / 2**30:.1f} GiB per worker by estimate"
    assert needs in ended.reason.text or "GiB of main memory" in ended.reason.text
    for way in plan.ways:
        assert ", ".join(way.changes) and all(field in ended.reason.text for field in way.changes)


def launched_on(job: TrainingJob, nodes: list[NodeFacts]) -> list[LaunchGroup]:
    transcript = Transcript(job_to_mapping(job))
    transcript.submit()
    for number, facts in enumerate(nodes):
        transcript.apply(FromNode(f"node-{number}", NodeJoined(facts=facts, offered_port=40_000)))
    return list(transcript.all(LaunchGroup))


@settings(max_examples=60)
@given(jobs(), st.lists(st.sampled_from([8, 24, 80, 141]), min_size=6, max_size=6))
def test_nodes_that_differ_run_the_mesh_of_the_smallest_device(
    made: tuple[TrainingJob | None, NodeFacts], sizes: list[int]
) -> None:
    job, node = made
    if job is None:
        return
    most = job.spec.nodes.max
    nodes = [replace(node, gpus=(Gpu("H100", size * 2**30),) * node.slots) for size in sizes[:most]]
    memory = memory_on(job, nodes)
    assert memory.device == min(sizes[:most]) * 2**30
    launched, chosen = launched_on(job, nodes), choose_mesh(job, most, memory)
    if chosen is None or not may_fit(job, chosen[0], memory):
        assert not launched
    elif num_nodes_used(job, chosen[0]) == most:  # otherwise it waits for the rest first
        assert launched[-1].membership.mesh == chosen[0]


@st.composite
def plain_jobs(draw: st.DrawFn) -> TrainingJob | None:
    """A script, whose model is not known, or the recipe on CPUs; None where axes do not fit."""
    workers, most = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
    divisors = [n for n in (1, 2, 4, 8) if workers % n == 0]
    parallelism = {
        "shard": draw(st.sampled_from(["auto", "world", *divisors])),
        "tensor": draw(st.sampled_from(divisors)),
        "context": draw(st.sampled_from([1, 1, 2])),
        "pipeline": draw(st.sampled_from([None, None, {"ranks": 2}])),
    }
    script = draw(st.booleans())
    recipe = None if script else {"globalBatch": 64, "data": {"sequenceLength": 64}}
    gpus = draw(st.sampled_from([0, 1, 2])) if script else 0
    resources: dict[str, Any] = {"gpu": gpus}
    if not gpus and draw(st.booleans()):
        resources["memory"] = draw(st.sampled_from(["32Mi", "64Mi", "1Gi"]))
    nodes = (draw(st.integers(1, most)), most)
    try:
        return make_job(
            nodes=nodes, workers=workers, recipe=recipe, parallelism=parallelism,
            resources=resources,
        )  # fmt: skip
    except SpecError:
        return None


@settings(max_examples=150)
@given(plain_jobs())
def test_scripts_and_jobs_on_cpus_are_launched_as_planned(job: TrainingJob | None) -> None:
    if job is None:
        return
    gpus = job.spec.resources.num_gpus * job.spec.workers_per_node
    node = replace(
        FACTS, slots=job.spec.workers_per_node, memory_bytes=64 * 2**30,
        gpus=(Gpu("H100", 80 * 2**30),) * gpus,
    )  # fmt: skip
    plan, launched = make_plan(job, node), launched_on(job, [node] * job.spec.nodes.max)
    if plan is None:
        assert not launched
    elif plan.num_nodes == job.spec.nodes.max:
        fits_here = may_fit(job, plan.mesh, memory_on(job, [node]))
        assert {one.membership.mesh for one in launched} == ({plan.mesh} if fits_here else set())


def test_a_job_on_cpus_whose_states_exceed_the_main_memory_of_its_nodes_is_refused() -> None:
    """Plan and controller reject it. Exactly: weights, gradients and two moments in float32."""
    recipe = {"model": {"dim": 2048, "numLayers": 8, "numHeads": 8, "vocabSize": 32000}}
    job = make_job(nodes=(2, 2), workers=2, recipe=recipe, parallelism={"shard": 4})
    work = workload_of(job)
    assert work is not None
    states = 16 * work.counts.total / 4
    for share, holds in ((1.02, True), (0.98, False)):
        node = replace(FACTS, memory_bytes=int(2 * share * states))
        plan = make_plan(job, node)
        assert plan is not None and plan.fits is (None if holds else False)
        transcript = Transcript(job_to_mapping(job))
        transcript.submit()
        for number in range(2):
            transcript.apply(
                FromNode(f"node-{number}", NodeJoined(facts=node, offered_port=40_000))
            )
        assert bool(transcript.all(LaunchGroup)) is holds
        if not holds:
            reason = transcript.last(FinishJob).reason
            assert reason.code == "does-not-fit"
            assert f"take {states / 2**30:.1f} GiB; expected at most" in reason.text


def test_a_small_job_on_cpus_runs_on_nodes_with_little_memory() -> None:
    """Less than is held back for processes: 1 GiB for each of four workers."""
    job = make_job(nodes=(1, 1), workers=4, recipe={})
    node = replace(FACTS, memory_bytes=2 * 2**30)
    assert memory_on(job, [node]).host == 0
    plan = make_plan(job, node)
    assert plan is not None and plan.fits is None
