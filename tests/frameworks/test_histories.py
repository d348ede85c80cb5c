"""The logs of transformers' Trainer that do not fit into its state in memory come from its own
checkpoints. None of these is a reason for a restore to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e]

NUM = 400
"""More logs than are kept in memory."""


def _trainer(folder: Path) -> Any:
    from torch import nn
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    trainer = Trainer(nn.Linear(2, 2), arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    return trainer


def _logs(num: int) -> list[dict[str, Any]]:
    return [{"loss": 0.5, "step": step} for step in range(1, num + 1)]


def _save(folder: Path, step: int) -> Path:
    """The state in the trainer's own checkpoint of this step."""
    from transformers.trainer_callback import TrainerState

    path = folder / f"checkpoint-{step}" / "trainer_state.json"
    path.parent.mkdir(parents=True)
    TrainerState(global_step=step, log_history=_logs(step)).save_to_json(str(path))
    return path


def _restored(folder: Path) -> list[int]:
    """The steps of the logs after a restore of step NUM in a node with these checkpoints."""
    from holdfast.workers.integrations.transformers_memory import _KeptOfTrainer

    before, after = _trainer(folder), _trainer(folder)
    before.state.global_step, before.state.log_history = NUM, _logs(NUM)
    _KeptOfTrainer(after).load_state_dict(_KeptOfTrainer(before).state_dict())
    return [one["step"] for one in after.state.log_history]


NEWEST = [*range(NUM - 256 + 1, NUM + 1)]
ALL = [*range(1, NUM + 1)]


def test_older_logs_come_from_the_newest_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 99)
    _save(tmp_path, 300)
    assert _restored(tmp_path) == ALL


@pytest.mark.parametrize("torn", [b"", b'{"log_history": [{"st', b"[]", b'{"log_history": [{}]}'])
def test_a_torn_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, torn: bytes) -> None:
    _save(tmp_path, 300)
    _save(tmp_path, 1000).write_bytes(torn)
    (tmp_path / "checkpoint-2000").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert _restored(tmp_path) == ALL


def test_a_node_without_checkpoints_has_the_newest_logs(tmp_path: Path) -> None:
    assert _restored(tmp_path / "absent") == NEWEST
    _save(tmp_path, 300).write_bytes(b"")
    assert _restored(tmp_path) == NEWEST
