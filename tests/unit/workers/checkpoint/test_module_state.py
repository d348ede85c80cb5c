"""Results of modules' get_extra_state are kept, or rejected by name at restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint import inspect
from holdfast.workers.checkpoint.state import TrainingState, combined_extra
from tests.unit.workers.checkpoint.fake_ranks import restore_alone, staged_alone
from tests.unit.workers.checkpoint.test_files import write


class Scaled(nn.Module):
    """A layer with state beside its tensors, as float8 layers have it."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def made(first: Any = None, second: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Scaled(first), nn.Linear(2, 2), Scaled(second))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


STATE = {"history": torch.arange(6.0).reshape(2, 3), "step": 7, "raw": b"\x00\xff", 3: (None, 1.5)}


def test_the_state_of_modules_is_restored() -> None:
    file = staged_alone(*made(STATE, torch.tensor([1, 255], dtype=torch.uint8)))
    model, optimizer = made()
    restore_alone(file, model, optimizer)
    got, second = model[0].state, model[2].state
    assert torch.equal(got.pop("history"), STATE["history"])
    assert got == {key: value for key, value in STATE.items() if key != "history"}
    assert torch.equal(second, torch.tensor([1, 255], dtype=torch.uint8))


def test_what_has_no_counterpart_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    plain = nn.Sequential(nn.ParameterDict({"weight": torch.ones(2)}), nn.Linear(2, 2), Scaled())
    file = staged_alone(*made(5, 6))
    restore_alone(file, plain, torch.optim.SGD(plain.parameters()))
    assert "the checkpoint has 0._extra_state, and the model has no such" in capsys.readouterr().err
    assert plain[2].state == 6
    model, optimizer = made(3, 4)
    restore_alone(staged_alone(plain, torch.optim.SGD(plain.parameters())), model, optimizer)
    assert "the checkpoint has no 0._extra_state; it stays" in capsys.readouterr().err
    assert (model[0].state, model[2].state) == (3, 6)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (object(), "got object from get_extra_state of Scaled"),
        ([nn.Parameter(torch.ones(1))], "got Parameter from"),
        (torch.ones(2, dtype=torch.complex128), "got Tensor of torch.complex128 from"),
    ],
)
def test_state_that_cannot_be_stored_is_rejected_by_name(state: Any, what: str) -> None:
    with pytest.raises(UserError, match=rf"2\._extra_state: {what}"):
        TrainingState(*made(None, state), None).expect_storable()


def test_a_module_that_cannot_take_its_state_back_is_rejected() -> None:
    class OneWay(Scaled):
        set_extra_state = nn.Module.set_extra_state

    model = nn.Sequential(OneWay(1))
    state = TrainingState(model, torch.optim.SGD(model.parameters()), None)
    with pytest.raises(UserError, match="OneWay with get_extra_state and without set_extra_state"):
        state.expect_storable()


def test_each_stage_of_a_pipeline_has_its_own_modules() -> None:
    stage = {"optimizer": {}, "modules": {"a._extra_state": [1, ""]}}
    other = {"optimizer": {}, "modules": {"a._extra_state": [2, ""], "b._extra_state": [3, ""]}}
    both = combined_extra(stage, other, [])
    assert both["modules"] == {"a._extra_state": [1, ""], "b._extra_state": [3, ""]}


@pytest.mark.parametrize("optimizer", [False, True])
def test_an_export_has_it_as_state_dict_has(tmp_path: Path, optimizer: bool) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    model, sgd = made(torch.arange(3.0), {"step": 7})
    manifest = write(tmp_path / "in", {0: staged_alone(model, sgd, step=1)})
    (file,) = inspect.export(str(tmp_path / "in"), manifest, tmp_path / "out", optimizer=optimizer)
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["modules"]) == {"2._extra_state": [{"step": 7}, ""]}
    tensors = load_file(file)
    assert tensors["0._extra_state"].tolist() == [0, 1, 2]
    assert tensors.keys() | {"2._extra_state"} == model.state_dict().keys()
