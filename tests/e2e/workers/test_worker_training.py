"""The recipe on real torch process groups over gloo, with a fake agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.protocol.facts import Restore
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.checkpoint import inspect
from holdfast.workers.checkpoint.layout import parse_header
from tests.e2e.workers.fake_agent import Generation, make_job, persist, run_session_loop

pytestmark = pytest.mark.e2e

HSDP = Mesh(replicate=2, shard=2)
STEPS = 6


@pytest.fixture(scope="module")
def whole() -> Generation:
    """An undisturbed run on four ranks, with a batch that only world size 1 divides."""
    generation = Generation(make_job(STEPS, config={"globalBatch": 5}), HSDP)
    assert generation.join() == [0, 0, 0, 0], generation.failures()
    return generation


def checksums(file: bytes) -> dict[str, str]:
    return {name: entry.checksum for name, entry in parse_header(file, "file").entries.items()}


def test_every_rank_reports_and_stages_every_step(whole: Generation) -> None:
    assert [p.step for p in whole.progress(3)] == list(range(STEPS))
    assert sorted(whole.staged) == list(range(STEPS))
    assert all(len(by_rank) == 4 for by_rank in whole.staged.values())
    header = parse_header(whole.staged[3][3], "file")
    assert (header.step, header.generation, header.shard, header.num_shards) == (3, 1, 1, 2)
    messages = [m for rank, m in whole.messages if rank == 0]
    phases = [m.phase for m in messages if isinstance(m, worker_protocol.PhaseChanged)]
    assert phases == ["build", "restore", "train", "finish"]
    assert any(isinstance(m, worker_protocol.Pulse) for m in messages)
    assert messages[-1] == worker_protocol.Finished(step=STEPS - 1)
    progress = whole.progress(0)[-1]
    assert progress.tokens == 5 * 16
    assert progress.flops_per_step > 0


def test_both_replicas_hold_the_same_state(whole: Generation) -> None:
    last = whole.staged[STEPS - 1]
    assert checksums(last[0]) == checksums(last[2])
    assert checksums(last[1]) == checksums(last[3])


def test_a_new_generation_continues_from_memory_exactly(whole: Generation) -> None:
    restore = Restore(step=2, generation=1, num_shards=2)
    again = Generation(
        make_job(STEPS, config={"globalBatch": 5}), HSDP, number=2, restore=restore,
        memory=whole.shards(2), warm_ranks=(1, 2),
    )  # fmt: skip
    assert again.join() == [0, 0, 0, 0], again.failures()
    losses = whole.losses()
    assert again.losses() == {step: losses[step] for step in (3, 4, 5)}
    # Bit for bit: the restore is exact.
    assert checksums(again.staged[STEPS - 1][1]) == checksums(whole.staged[STEPS - 1][1])


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(), id="one-process"),
        pytest.param(Mesh(replicate=2), id="ddp"),
        pytest.param(Mesh(shard=3), id="fsdp"),
    ],
)
def test_other_world_sizes_see_the_same_batches_and_losses(whole: Generation, mesh: Mesh) -> None:
    other = Generation(make_job(4, config={"globalBatch": 5}), mesh)
    assert set(other.join()) == {0}, other.failures()
    want = whole.losses()
    assert other.losses() == pytest.approx({step: want[step] for step in range(4)}, rel=2e-4)


def test_micro_batches_give_the_same_gradients(whole: Generation) -> None:
    config = {"globalBatch": 5, "microBatch": 1}
    other = Generation(make_job(3, config=config), HSDP)
    assert set(other.join()) == {0}, other.failures()
    want = whole.losses()
    assert other.losses() == pytest.approx({step: want[step] for step in range(3)}, rel=2e-4)
    assert any(isinstance(m, worker_protocol.ProgressTick) for _, m in other.messages)


@pytest.mark.parametrize(
    "mesh", [HSDP, Mesh(shard=2), Mesh(replicate=2)], ids=("hsdp", "fsdp", "ddp")
)
def test_bfloat16_with_sums_in_float32_has_similar_losses(whole: Generation, mesh: Mesh) -> None:
    precision = {"parameters": "bfloat16", "reduce": "float32"}
    job = make_job(4, config={"globalBatch": 5}, parallelism={"precision": precision})
    other = Generation(job, mesh)
    assert set(other.join()) == {0}, other.failures()
    want, found = whole.losses(), other.losses()
    assert found == pytest.approx({step: want[step] for step in range(4)}, rel=2e-2)
    assert found != pytest.approx({step: want[step] for step in range(4)}, rel=1e-6)
    # The stored parameters are the optimizer's float32.
    header = parse_header(other.staged[3][0], "file")
    kept = {entry.dtype for name, entry in header.entries.items() if name.startswith("model.")}
    assert kept == {"F32"}


def test_a_smaller_mesh_continues_from_the_memory_of_a_larger_one(whole: Generation) -> None:
    restore = Restore(step=2, generation=1, num_shards=2)
    config = {"globalBatch": 5, "evaluateEverySteps": 2}
    shrunk = Generation(
        make_job(STEPS, config=config), Mesh(replicate=2), number=2, restore=restore,
        memory=whole.shards(2),
    )  # fmt: skip
    assert shrunk.join() == [0, 0], shrunk.failures()
    want = whole.losses()
    assert shrunk.losses() == pytest.approx({step: want[step] for step in (3, 4, 5)}, rel=2e-4)
    assert worker_protocol.PhaseChanged(phase="evaluate") in [m for _, m in shrunk.messages]


def test_another_mesh_continues_from_storage(whole: Generation, tmp_path: Path) -> None:
    manifest = persist(tmp_path, whole, step=1)
    assert inspect.verify(str(tmp_path), manifest).ok
    restore = Restore(step=1, generation=1, num_shards=2, directory=manifest.directory)
    parallelism = {"fsdp": {"reshardAfterForward": False}, "activationCheckpointing": {"full": {}}}
    other = Generation(
        make_job(4, config={"globalBatch": 5}, parallelism=parallelism), Mesh(shard=3), number=2,
        restore=restore, checkpoint_path=f"file://{tmp_path}",
    )  # fmt: skip
    assert other.join() == [0, 0, 0], other.failures()
    want = whole.losses()
    assert other.losses() == pytest.approx({step: want[step] for step in (2, 3)}, rel=2e-4)


def test_damage_and_another_model_end_the_worker_with_a_clear_error(
    whole: Generation, tmp_path: Path
) -> None:
    manifest = persist(tmp_path, whole, step=1)
    restore = Restore(step=1, generation=1, num_shards=2, directory=manifest.directory)
    wider = {"dim": 64, "numLayers": 2, "numHeads": 2}
    other = Generation(
        make_job(STEPS, config={"model": wider}), Mesh(), number=2, restore=restore,
        checkpoint_path=str(tmp_path),
    )  # fmt: skip
    assert other.join() == [1]
    failed = other.failures()[0]
    assert failed.error_type == "WrongModel"
    assert "embedding.weight: got F32[256, 32]; expected F32[256, 64]" in failed.message

    file = tmp_path / manifest.directory / manifest.files[1].file
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(bytes(content))
    damaged = Generation(
        make_job(STEPS), Mesh(), number=2, restore=restore, checkpoint_path=str(tmp_path)
    )
    assert damaged.join() == [1]
    failed = damaged.failures()[0]
    assert failed.error_type == "DamagedCheckpoint"
    assert manifest.files[1].file in failed.message


def test_a_users_own_loop_continues_after_its_last_step() -> None:
    job = make_job()
    first = Generation(job, Mesh(shard=2), entry=run_session_loop)
    first.wait_for(lambda: len(first.staged.get(5, {})) == 2)
    first.kill()
    done = max(step for step, by_rank in first.staged.items() if len(by_rank) == 2)
    restore = Restore(step=done, generation=1, num_shards=2)
    second = Generation(
        job, Mesh(shard=2), number=2, restore=restore, memory=first.shards(done),
        entry=run_session_loop,
    )  # fmt: skip
    second.wait_for(lambda: len(second.progress(1)) >= 3)
    second.kill()
    assert second.progress(0)[0].step == done + 1
    extra = parse_header(second.staged[done + 1][0], "file").extra["user"]
    assert extra == {"samples": 64 * 2 * (done + 2)}
