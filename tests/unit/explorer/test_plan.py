"""The plan that `holdfast spec plan` shows."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.core.rank_assignment import mesh_for
from holdfast.orchestrator.explorer.plan import make_plan
from holdfast.orchestrator.planner.choose import memory_on
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts
from holdfast.orchestrator.protocol.mesh import Mesh

from ..planner.builders import FACTS, make_job
from ..planner.test_micro_batch import GIB, batch_job, offloading


def test_a_script_gets_a_mesh_but_no_memory_table() -> None:
    plan = make_plan(make_job(), FACTS)
    assert plan is not None
    assert plan.estimate is None
    assert plan.host == ()
    assert plan.parameters is None
    assert plan.fits is None  # the model is not known


def test_the_plan_puts_every_rank_on_one_node() -> None:
    plan = make_plan(make_job(recipe={}), FACTS)
    assert plan is not None
    ranks = [rank.rank for node in plan.nodes for rank in node.ranks]
    assert ranks == list(range(plan.mesh.world_size))
    assert [size.nodes for size in plan.sizes] == [1, 2]
    assert plan.sizes[0].samples_per_rank == 4


def test_the_plan_warns_when_a_smaller_size_runs_out_of_memory() -> None:
    gpus = (Gpu("H200", 3 * 2**30),) * 2
    facts = NodeFacts(hostname="a", address="10.0.0.1", data_port=1, slots=2, gpus=gpus)
    recipe = {
        "globalBatch": 64,
        "microBatch": 32,
        "data": {"sequenceLength": 512},
        "model": {"dim": 512, "numHeads": 8},
    }
    plan = make_plan(make_job(recipe=recipe, resources={"gpu": 1}), facts)
    assert plan is not None
    assert any("on 1 node " in warning for warning in plan.warnings)


def test_a_wide_range_of_sizes_shows_its_ends() -> None:
    plan = make_plan(make_job(nodes=(2, 1000), recipe={}), FACTS, num_nodes=3)
    assert plan is not None
    counts = [size.nodes for size in plan.sizes]
    assert counts[0] == 2
    assert counts[-1] == 1000
    assert len(counts) <= 7


def test_a_plan_that_does_not_fit_has_ways_that_do() -> None:
    """States need more shards; activations need checkpointing or a smaller batch."""
    llama = {"dim": 8192, "numLayers": 80, "numHeads": 64, "numKvHeads": 8, "ffnDim": 28672}
    states = {"globalBatch": 8, "model": {**llama, "vocabSize": 128256}}
    job = make_job(nodes=(1, 1), workers=8, recipe=states, resources={"gpu": 1})
    plan = make_plan(job, FACTS, device_memory_bytes=80 * 2**30)
    assert plan is not None and plan.estimate is not None
    assert plan.fits is False
    assert plan.estimate.peak_bytes > 0.8 * 80 * 2**30
    # 131 GiB of states per worker: only more workers or main memory hold them.
    assert plan.ways
    assert all({"nodes.max", "parallelism.offload"} & way.changes.keys() for way in plan.ways)
    # Of a recipe of few parameters and many tokens the activations are what does not fit.
    activations = {
        "globalBatch": 512,
        "microBatch": 256,
        "model": {"dim": 512, "numHeads": 8},
        "data": {"sequenceLength": 1024},
    }
    job = make_job(nodes=(1, 1), workers=2, recipe=activations, resources={"gpu": 1})
    plan = make_plan(job, FACTS, device_memory_bytes=8 * 2**30)
    assert plan is not None and plan.fits is False
    assert any("entrypoint.recipe.config.microBatch" in way.changes for way in plan.ways)


def test_a_plan_that_fits_has_no_ways() -> None:
    plan = make_plan(make_job(recipe={}), FACTS, device_memory_bytes=8 * 2**30)
    assert plan is not None
    assert plan.fits is True
    assert plan.ways == ()


def test_seventy_billion_parameters_are_launched_as_planned() -> None:
    """The model was planned with shard 64 and launched as 8 x 8, which needs 289 GiB of 80."""
    model = {"dim": 8192, "numLayers": 80, "numHeads": 64, "numKvHeads": 8, "ffnDim": 28672}
    recipe = {
        "globalBatch": 64,
        "model": {**model, "vocabSize": 128256},
        "data": {"sequenceLength": 4096},
    }
    job = make_job(nodes=(8, 8), workers=8, recipe=recipe, resources={"gpu": 1})
    memory = memory_on(job, [replace(FACTS, gpus=(Gpu("H100", 80 * 2**30),) * 8)])
    assert mesh_for(job, 8, memory) == Mesh(shard=64)


def test_the_plan_says_what_does_not_fit_into_a_nodes_main_memory() -> None:
    recipe = {"model": {"dim": 2048, "numHeads": 16}}
    job = make_job(nodes=(2, 2), recipe=recipe, parallelism={"shard": 4})
    sizes = [2**30 * gib for gib in (512, 14, 10, 7)]
    plans = [make_plan(job, replace(FACTS, memory_bytes=size)) for size in sizes]
    found = [plan.host_memory for plan in plans if plan is not None]
    given_up = [one.grant.given_up for one in found if one is not None]
    assert given_up == ["nothing", "copies", "buffers", "memory-tier"]
    for plan in plans[1:]:
        assert plan is not None
        assert [text for text in plan.warnings if text.startswith("host memory, by estimate")]


def test_the_rows_of_the_host_are_what_the_node_is_given() -> None:
    job = make_job(nodes=(2, 2), recipe={}, parallelism={"shard": 4})
    plan = make_plan(job, replace(FACTS, memory_bytes=2**40))
    assert plan is not None and plan.host_memory is not None
    memory = plan.host_memory
    rows = [row.num_bytes for row in plan.host if row.where == "node"]
    assert sum(rows) == (memory.grant.buffers + 3) * memory.unit_bytes


def test_main_memory_of_a_machine_without_the_gpus_of_the_job_is_not_planned_with() -> None:
    job = make_job(nodes=(2, 2), recipe={}, parallelism={"shard": 4}, resources={"gpu": 1})
    plan = make_plan(job, replace(FACTS, memory_bytes=2**30))
    assert plan is not None and plan.host_memory is None


def test_the_plan_names_why_the_micro_batch_is_smaller() -> None:
    node = replace(FACTS, gpus=(Gpu("H100", 24 * GIB),) * 8)
    plan = make_plan(batch_job(512), node)
    assert plan is not None and plan.estimate is not None and plan.fits
    assert plan.estimate.num_micro_batches > 1
    assert plan.micro_batch_why.startswith("microBatch auto: all 64 samples of a rank at once")
    written = make_plan(batch_job(512, 2), node)
    assert written is not None and written.micro_batch_why == ""


def test_the_plan_names_the_main_memory_for_offloaded_states() -> None:
    case, gpus = offloading(), (Gpu("H100", 80 * GIB),) * 8
    plan = make_plan(case.job, replace(FACTS, gpus=gpus, memory_bytes=2048 * GIB))
    assert plan is not None and plan.fits and "229.4 GiB" in plan.offload_memory
    assumed = make_plan(case.job, replace(FACTS, gpus=gpus))
    assert assumed is not None and "assumed" in assumed.offload_memory


def test_the_plan_warns_of_variables_in_the_words_of_the_other_commands() -> None:
    job = make_job(env={"NCCL_TIMEOUT": "3600"}, resources={"gpu": 1})
    plan, shown = make_plan(job, FACTS), remarks(job)
    assert plan is not None and shown and set(shown) <= set(plan.warnings)


def test_a_plan_without_gpus_warns_on_a_machine_that_has_gpus() -> None:
    node = replace(FACTS, gpus=(Gpu("NVIDIA H100", 80 * GIB),) * 3)
    plan = make_plan(make_job(resources={"gpu": 0}), node)
    assert plan is not None
    assert any("resources.gpu is 0" in text and "3 x NVIDIA" in text for text in plan.warnings)
