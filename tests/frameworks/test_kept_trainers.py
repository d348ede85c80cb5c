"""Survivors of a kill keep their process under a trainer without a line for it, and all that the
trainer counts is what it would have been; or they start again, for a reason that is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .catalogue import by_name, environment
from .test_in_memory import IN_MEMORY, RARELY
from .test_recovery import Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NEEDS = ("transformers", "accelerate")
STEPS = 40
"""Two and a half epochs."""
KEEPS = IN_MEMORY | {
    "preload": True,
    "recovery": {"keepProcesses": "auto"},
    "nodes": {"min": 2, "max": 2},
}


def results(place: Path) -> list[Any]:
    """Results that each rank has written at the end of the training."""
    return [json.loads(path.read_text()) for path in sorted(place.glob("out/result-*.json"))]


@pytest.mark.parametrize(("script", "shard"), [("hf_kept.py", 1), ("hf_kept_fsdp2.py", "world")])
def test_survivors_keep_their_process_and_the_trainer_ends_as_an_undisturbed_one(
    script: str, shard: int | str, start: Start, tmp_path: Path
) -> None:
    framework = replace(by_name("hf"), script=script)
    fields = KEEPS | {"parallelism": {"shard": shard}}
    job, _ = start(framework, save_every=RARELY, **fields)
    finish(job)
    undisturbed = results(tmp_path)
    assert len(undisturbed) == 4 and undisturbed[0]["step"] == STEPS
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "steps.jsonl").unlink()
    job, log = start(replace(framework, name="hf-killed"), save_every=RARELY, **fields)
    num_kept = 0
    for number, (rank, step) in enumerate([(1, 7), (0, 15), (2, 31)], 1):  # not in an evaluation
        trained(log, job, step)
        before = job.worker_pids()
        os.kill(before.pop(rank), signal.SIGKILL)
        job.running(incidents=number)
        num_kept += len(before.items() & job.worker_pids().items())
    finish(job)
    assert results(tmp_path) == undisturbed
    assert num_kept >= 6  # of 9: one that does not leave its step within a second is killed


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("COUNTS", "Result.count of the trainer or a callback"),
        ("EVALUATES_FIRST", "the script has collectives outside its attempts"),  # eval_on_start
    ],
)
def test_the_script_of_a_trainer_with_a_state_or_collectives_of_its_own_runs_again(
    variable: str, why: str, start: Start, tmp_path: Path
) -> None:
    env = environment(tmp_path, IN_MEMORY["pace_s"]) | {variable: "1"}
    fields = KEEPS | {"parallelism": {"shard": 1}, "env": env, "steps": 20}
    job, log = start(replace(by_name("hf"), script="hf_kept.py"), save_every=RARELY, **fields)
    trained(log, job, 4)
    assert why in job.until(lambda v: bool(v.keeping)).keeping
    before = job.worker_pids()
    os.kill(before.pop(1), signal.SIGKILL)
    assert f"start again: {why}" in job.running(incidents=1).incidents[0].decision
    assert before.items() < job.worker_pids().items()
    finish(job)
    assert [result["step"] for result in results(tmp_path)] == [20] * 4


def test_an_order_of_samples_that_is_drawn_over_epochs_keeps_no_process() -> None:
    import torch
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

    from holdfast.workers.integrations.transformers_memory import _why_other_order

    class Own(Sampler[int]):
        pass

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    data: Any = range(8)
    for sampler in (SequentialSampler(data), RandomSampler(data), SeedableRandomSampler(data)):
        assert _why_other_order(DataLoader(data, sampler=sampler)) == ""
    drawn = RandomSampler(data, generator=torch.Generator())
    assert "RandomSampler has the order" in _why_other_order(DataLoader(data, sampler=drawn))
    assert "Own has the order" in _why_other_order(DataLoader(data, sampler=Own()))
    assert "has the order" in _why_other_order(DataLoader(Stream()))
