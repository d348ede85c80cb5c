"""State that is not a tensor is restored unchanged, or refused before it is written."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint import layout
from holdfast.workers.checkpoint.layout import pack, parse_header, unpack
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import restore_alone, staged_alone

Schedule = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 4),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [5, 5, 10], gamma=0.1),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=15, power=2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=4, cycle_momentum=False),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2.0, total_steps=30),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
    "swa": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=8),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [3, 6])], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=6), lr_scheduler.MultiStepLR(o, [5, 10])]
    ),
}


def made(schedule: Schedule) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    return model, optimizer, schedule(optimizer)


def rates(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, n: int) -> list[float]:
    """The learning rates of the next n steps, of a loss that does not improve."""
    out = []
    for _ in range(n):
        out.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
        schedule.step(*([1.0] if plateau else []))
    return out


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("after", [1, 3])
def test_a_restored_schedule_continues_unchanged(name: str, after: int) -> None:
    model, optimizer, schedule = made(SCHEDULES[name])
    rates(model, optimizer, schedule, after)
    file = staged_alone(model, optimizer, schedule)
    again = made(SCHEDULES[name])
    restore_alone(file, *again)
    assert rates(*again, 10) == rates(model, optimizer, schedule, 10)
    state = again[2].state_dict()
    assert {k: type(v) for k, v in state.items()} == {
        k: type(v) for k, v in schedule.state_dict().items()
    }


def test_a_plateau_scheduler_without_a_loss_is_restored() -> None:
    model, optimizer, schedule = made(SCHEDULES["plateau"])
    again = made(SCHEDULES["plateau"])
    again[2].best = 0.0
    restore_alone(staged_alone(model, optimizer, schedule), *again)
    assert again[2].best == math.inf


def test_infinite_numbers_and_tuples_are_restored() -> None:
    extra = {
        "best": math.inf, "worst": -math.inf, "nan": math.nan, "where": (1, (2.5, None)),
        "seen": {5: "a", (1, True): "b"}, "drawn": Counter({5: 2}), 7: "a key of its own",
    }  # fmt: skip
    model, optimizer, _ = made(SCHEDULES["step"])
    got: dict[Any, Any] = {}
    restore_alone(staged_alone(model, optimizer, extra), model, optimizer, got)
    assert math.isnan(got.pop("nan")) and math.isnan(extra.pop("nan"))
    assert got == extra
    assert type(got["drawn"]) is Counter


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**70), 5e-324, -0.0, "\ud800 \u0000 ü", [], {}, (), [[()]],
        {"__float__": "inf"}, {"__tuple__": [1]}, {"__pairs__": []}, {"__counter__": 1, "b": 2},
        {"": {"__pairs__": 3}}, {None: 1, 1.5: 2, True: 3}, Counter("aab"),
        OrderedDict(b=1, a=(2,)), np.float64(0.1), enum.IntEnum("E", "A").A, {math.inf: math.inf},
    ],
    ids=repr,
)  # fmt: skip
def test_unpack_returns_the_packed_value(value: Any) -> None:
    file = layout.make_layout(
        [], generation=1, shard=0, num_shards=1, extra=layout.encode_extra({"x": pack(value)})
    )
    start = bytes(file.render(0, [], layout.encode_extra({"x": pack(value)})))
    got = unpack(parse_header(start, "file").extra["x"])
    assert got == value
    assert repr(got) == repr(value) or isinstance(value, OrderedDict | np.floating | enum.Enum)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"deep": [torch.zeros(2)]}, "Tensor"),
        ({1, 2}, "set"),
        ({object(): 1}, "object"),
        (np.int64(3), "int64"),
        (b"abc", "bytes"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unsupported_value_is_refused_by_name_before_it_is_written(
    value: Any, what: str
) -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    with pytest.raises(UserError, match=rf"extra\['mine'\]: got {what}; expected numbers"):
        staged_alone(model, optimizer, {"fine": 1, "mine": value})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    model, optimizer, _ = made(SCHEDULES["step"])
    with pytest.raises(UserError, match=r"extra\['mine'\]: got a value that contains itself"):
        staged_alone(model, optimizer, {"mine": loop})


def test_unsupported_optimizer_state_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"history": [torch.zeros(2)]}
    with pytest.raises(UserError, match=r"optimizer.state\['weight'\]\['history'\]: got Tensor"):
        staged_alone(model, optimizer)
    optimizer.state.clear()
    optimizer.param_groups[0]["rates"] = (torch.zeros(()),)
    with pytest.raises(UserError, match=r"optimizer.param_groups\[0\]\['rates'\]: got Tensor"):
        staged_alone(model, optimizer)


def test_infinite_optimizer_settings_are_restored() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    optimizer.param_groups[0]["limit"] = math.inf
    file = staged_alone(model, optimizer)
    again = torch.optim.AdamW(model.parameters())
    restore_alone(file, model, again)
    assert again.param_groups[0]["limit"] == math.inf
    assert again.param_groups[0]["betas"] == (0.8, 0.9)


def test_headers_are_standard_json() -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    file = staged_alone(model, optimizer, {"best": math.inf})
    header = msgspec.json.decode(file[8 : 8 + int.from_bytes(file[:8], "little")])
    inner = msgspec.json.decode(header["__metadata__"]["holdfast"])
    assert unpack(inner["extra"]["user"]) == {"best": math.inf}


class Counted:
    """An object with state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_several_objects_and_values_are_restored_by_name() -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    file = staged_alone(model, optimizer, {"ema": Counted(3), "best": 0.5, "stage": Counted(4)})
    extra = {"best": 9.0, "stage": Counted(), "ema": Counted()}
    restore_alone(file, model, optimizer, extra)
    assert (extra["ema"].count, extra["stage"].count, extra["best"]) == (3, 4, 0.5)


def test_values_are_restored_into_the_containers_that_a_script_may_hold() -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    stored = {"seen": [1, [2], {"a": [3]}], "by": {"x": [4]}, "drawn": Counter("aab")}
    file = staged_alone(model, optimizer, stored)
    extra: dict[str, Any] = {"seen": [9, [9], {"a": []}, 9], "by": {"x": [], "y": 1}, "drawn": {}}
    seen, inner, by = extra["seen"], extra["seen"][2]["a"], extra["by"]
    restore_alone(file, model, optimizer, extra)
    assert extra == stored and type(extra["drawn"]) is Counter
    assert seen is extra["seen"] and inner is seen[2]["a"] and by is extra["by"]


def test_objects_without_a_counterpart_are_named_and_others_restored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    file = staged_alone(model, optimizer, {"ema": Counted(3), "old": Counted(4)})
    extra: dict[str, Any] = {"ema": Counted(), "new": Counted(7)}
    restore_alone(file, model, optimizer, extra)
    assert (extra["ema"].count, extra["new"].count, list(extra)) == (3, 7, ["ema", "new"])
    said = capsys.readouterr().err
    assert "the checkpoint has no state of 'new'; it stays as the script made it" in said
    assert "the checkpoint has state of 'old', which the script does not give" in said


def test_one_object_is_not_taken_for_several_nor_several_for_one() -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    one = staged_alone(model, optimizer, Counted(3))
    with pytest.raises(UserError, match="got 'ema' by name in `extra`; expected one object"):
        restore_alone(one, model, optimizer, {"ema": Counted()})
    several = staged_alone(model, optimizer, {"ema": Counted(3)})
    with pytest.raises(UserError, match=r"expected 'ema' by name.*extra=\{'ema': ema, ...\}"):
        restore_alone(several, model, optimizer, Counted())


def test_a_value_without_a_form_is_named_with_its_object() -> None:
    model, optimizer, _ = made(SCHEDULES["step"])
    wrong = Counted()
    wrong.count = torch.zeros(2)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"extra\['ema'\]: got Tensor; expected numbers"):
        staged_alone(model, optimizer, {"ema": wrong})


# -- what the script no longer gives, or gives otherwise ----------------------------------------
def test_a_schedule_that_the_script_no_longer_gives_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer, schedule = made(SCHEDULES["cosine"])
    file = staged_alone(model, optimizer, {"sch": schedule, "n": 1})
    restore_alone(file, model, optimizer, None)
    assert "has 'sch', 'n', and the script gives no extra: it is not restored" in (
        capsys.readouterr().err
    )


def test_what_only_the_script_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, schedule = made(SCHEDULES["cosine"])
    extra: dict[str, Any] = {"n": 2, "new": 7}
    restore_alone(staged_alone(model, optimizer, {"n": 1}), model, optimizer, extra)
    assert extra == {"n": 1, "new": 7}
    assert "no state of 'new'; it stays as the script made it" in capsys.readouterr().err
    restore_alone(staged_alone(model, optimizer), model, optimizer, schedule)
    assert "has none; the CosineAnnealingLR stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"lr": 0.5}, "optimizer.param_groups[0]['lr'] (0.5 in the script, 0.25 in the"),
        ({"betas": (0.5, 0.6)}, "['betas'] ((0.5, 0.6) in the script, (0.9, 0.999) in the"),
        ({"amsgrad": True}, "optimizer.param_groups[0]['amsgrad'] (True in the script, False in"),
        ({"T_max": 50}, "extra['sch']['T_max'] (50 in the script, 100 in the checkpoint)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_changed_setting_of_the_script_is_printed_with_both_values(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(T_max: int = 100, **settings: Any) -> tuple[nn.Module, Any, dict[str, Any]]:  # noqa: N803
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        return model, optimizer, {"sch": lr_scheduler.CosineAnnealingLR(optimizer, T_max)}

    model, optimizer, extra = script()
    state = TrainingState(model, optimizer, extra)
    optimizer.step()
    extra["sch"].step()
    optimizer.param_groups[0]["lr"] = 0.25  # as a schedule of the script does
    header = state.export_extra()
    again = script(**change)
    TrainingState(*again).import_extra(header)
    shown = capsys.readouterr().err
    assert said in shown and (said != "" or shown == "")
    assert (again[1].param_groups[0]["lr"], again[1].param_groups[0]["amsgrad"]) == (0.25, False)
    assert again[2]["sch"].T_max == 100


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("step", "cosine", "a StepLR, and the script gives a CosineAnnealingLR: it continues at"),
        ("step", "cosine", "'T_max', 'eta_min' stay as the script made them"),
        ("multiplicative", "lambda", "a MultiplicativeLR, and the script gives a LambdaLR"),
        ("cosine", "cosine", ""),
    ],
)
def test_a_schedule_that_gets_the_state_of_another_kind_is_named(
    before: str, after: str, said: str, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, schedule = made(SCHEDULES[before])
    file = staged_alone(model, optimizer, {"sch": schedule} if named else schedule)
    model, optimizer, schedule = made(SCHEDULES[after])
    restore_alone(file, model, optimizer, {"sch": schedule} if named else schedule)
    shown = capsys.readouterr().err
    assert said in shown and ("extra['sch']: the checkpoint has the" in shown) == (
        named and bool(said)
    )


def test_a_schedule_over_a_tensor_is_restored() -> None:
    def script() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 9)

    before, after = script(), script()
    rates(*before, 3)
    restore_alone(staged_alone(*before), *after)
    assert [float(one) for one in rates(*after, 4)] == [float(one) for one in rates(*before, 4)]


def test_an_averaged_model_in_extra_is_rejected_with_what_works() -> None:
    from torch.optim.swa_utils import AveragedModel

    model, optimizer, _ = made(SCHEDULES["step"])
    state = TrainingState(model, optimizer, {"ema": AveragedModel(model)})
    with pytest.raises(UserError, match=r"extra\['ema'\]: got Tensor.*nn.ModuleDict\(") as error:
        state.expect_storable()
    assert 's.restore(nn.ModuleDict({"model": model, "ema": ema}), optimizer)' in str(error.value)
