"""Messages of the callbacks while real trainers evaluate, save and end, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.session import reporting

from .agent_end import AgentEnd, agent

__all__ = ["agent"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


WORKING = {"evaluate", "save", "finish"}
"""Phases in which a rank may make no progress for 600 s."""


# -- transformers -----------------------------------------------------------------------------
def hf_trainer(agent: AgentEnd, folder: Path, **settings: Any) -> Any:
    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from holdfast.integrations import TransformersCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            agent.sees("training" if self.training else "evaluation")
            outputs = self.layer(inputs)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **more: Any) -> None:
            agent.sees(f"save of step {self.state.global_step}")
            super()._save_checkpoint(*args, **more)

        def _load_best_model(self) -> None:
            agent.sees("best model")
            super()._load_best_model()

    torch.manual_seed(0)
    data = [{"inputs": torch.randn(4), "labels": torch.zeros(1)} for _ in range(32)]
    fields = {
        "max_steps": 6, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        "logging_steps": 1, "learning_rate": 0.05, **settings,
    }  # fmt: skip
    return Saving(
        Model(), TrainingArguments(output_dir=str(folder), **fields), train_dataset=data,
        eval_dataset={"a": data, "b": data[:16]}, callbacks=[TransformersCallback()],
    )  # fmt: skip


BEST = {
    "save_strategy": "best", "metric_for_best_model": "eval_b_loss", "greater_is_better": False,
    "load_best_model_at_end": True,
}  # fmt: skip


def test_every_batch_of_two_evaluations_and_of_a_prediction_has_a_phase(
    agent: AgentEnd, tmp_path: Path
) -> None:
    trainer = hf_trainer(agent, tmp_path, **BEST)
    trainer.train()
    assert agent.phases_of("training") == {"train"}
    assert agent.phases_of("evaluation") <= WORKING
    assert agent.phases_of("save of step 2") == {"save"}, "it is better than none"
    assert agent.phases_of("best model") <= WORKING
    assert agent.channel.phase == "finish"
    assert [one.step for one in agent.steps] == [*range(6)]
    agent.seen.clear()
    trainer.predict(trainer.eval_dataset["a"])
    assert agent.phases_of("evaluation") <= {"finish", "evaluate"}
    agent.seen.clear()
    trainer.evaluate()
    assert agent.phases_of("evaluation") == {"evaluate"}


def test_a_long_evaluation_shows_that_it_moves(
    agent: AgentEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "TICK_S", 0.0)
    hf_trainer(agent, tmp_path, eval_steps=6).train()
    assert agent.ticks == 8 + 4, "the batches of both data sets"


@pytest.mark.parametrize("settings", [{}, BEST], ids=["no", "best"])
def test_a_planned_stop_saves_before_an_evaluation_of_its_step(
    agent: AgentEnd, tmp_path: Path, settings: dict[str, Any]
) -> None:
    trainer = hf_trainer(agent, tmp_path, **settings)
    if settings:
        trainer.state.best_metric = -1.0  # no evaluation is better
    worker_transport.send(agent.link, worker_protocol.StopNotice(after_step=1, grace_s=25.0))
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 0
    assert [one.step for one in agent.steps] == [0, 1]
    assert "evaluation" not in dict(agent.seen)
    assert agent.phases_of("save of step 2") == {"save"}
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()


# -- Lightning --------------------------------------------------------------------------------
def lightning_module(agent: AgentEnd) -> Any:
    import lightning
    import torch
    from torch import nn

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def _loss(self, batch: Any, what: str) -> torch.Tensor:
            agent.sees(what)
            (inputs,) = batch
            return self.layer(inputs).square().mean()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self._loss(batch, "training")

        def validation_step(self, batch: Any, index: int) -> torch.Tensor:
            return self._loss(batch, "validation")

        def _tested(self, batch: Any, index: int) -> torch.Tensor:
            return self._loss(batch, "test")

        test_step = _tested

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self._loss(batch, "prediction")

        def on_train_end(self) -> None:
            agent.sees("end")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def gan_module() -> Any:
    """Manual optimization: both optimizers step in each batch."""
    import lightning
    import torch
    from torch import nn

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            (real,) = batch
            of_critic, of_generator = self.optimizers()
            made = self.generator(torch.randn_like(real))
            loss = self.critic(made.detach()).mean() - self.critic(real).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
            of_generator.zero_grad()
            self.manual_backward(-self.critic(made).mean())
            of_generator.step()
            return loss.detach()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            parts = (self.critic, self.generator)
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]

    return Gan()


def lightning_trainer(folder: Path, **settings: Any) -> Any:
    import lightning

    from holdfast.integrations import LightningCallback

    fields = {"max_epochs": 2, "val_check_interval": 2, **settings}
    return lightning.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=[LightningCallback()],
        logger=False, enable_progress_bar=False, enable_model_summary=False, **fields,
    )  # fmt: skip


def loader(num: int = 5) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.randn(num * 4, 4)), batch_size=4)


def test_validation_test_and_prediction_of_lightning_have_a_phase(
    agent: AgentEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "TICK_S", 0.0)
    module, trainer = lightning_module(agent), lightning_trainer(tmp_path)
    trainer.fit(module, loader(), loader(4))
    assert agent.phases_of("training") == {"train"}
    assert agent.phases_of("validation") == {"evaluate"}
    assert agent.phases_of("end") == {"finish"}
    # One before the training, of 2 batches, and two in each epoch, of 4; those of the first batches
    # are in the phase that on_validation_start entered.
    assert agent.ticks == 2 + 4 * 4
    assert agent.channel.phase == "finish", "also after the checkpoint of the end"
    assert [one.step for one in agent.steps] == [*range(10)]
    trainer.test(module, loader())
    trainer.predict(module, loader())
    assert agent.phases_of("test") == agent.phases_of("prediction") == {"evaluate"}


def test_two_optimizers_of_lightning_count_as_one_step_of_a_batch(
    agent: AgentEnd, tmp_path: Path
) -> None:
    trainer = lightning_trainer(tmp_path, val_check_interval=1.0)
    trainer.fit(gan_module(), loader())
    assert trainer.global_step == 20, "what Lightning counts"
    assert [(one.step, one.total_steps) for one in agent.steps] == [(n, 10) for n in range(10)]


def test_a_stopped_gan_goes_on_with_the_next_batch(agent: AgentEnd, tmp_path: Path) -> None:
    worker_transport.send(agent.link, worker_protocol.StopNotice(after_step=6, grace_s=25.0))
    with pytest.raises(SystemExit):
        lightning_trainer(tmp_path, val_check_interval=1.0).fit(gan_module(), loader())
    reporting._last = reporting._Steps()
    agent.channel._notice = None
    again = lightning_trainer(tmp_path, val_check_interval=1.0, max_epochs=3)
    again.fit(gan_module(), loader(), ckpt_path=str(next(tmp_path.rglob("last.ckpt"))))
    assert [one.step for one in agent.steps] == [*range(15)]
    assert agent.steps[-1].total_steps == 15


def test_max_steps_counts_the_steps_of_all_optimizers_so_no_total_is_shown(
    agent: AgentEnd, tmp_path: Path
) -> None:
    lightning_trainer(tmp_path, val_check_interval=1.0, max_steps=12).fit(gan_module(), loader())
    assert [(one.step, one.total_steps) for one in agent.steps] == [(n, 0) for n in range(6)]
