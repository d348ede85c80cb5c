"""Measurement that a plan uses, and what it multiplies."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.catalogue.calibration import (
    Calibration,
    CalibrationEntry,
    Key,
    key_of,
    nearest,
    with_entry,
)
from holdfast.orchestrator.catalogue.load import load_catalogue
from holdfast.orchestrator.explorer.cpu import EFFICIENCY, cpu_device
from holdfast.orchestrator.explorer.step_time import (
    Hardware,
    parts_alone,
    step_time,
    update_seconds,
)
from holdfast.orchestrator.protocol.mesh import Mesh

from ..planner.builders import make_job, planned

RECIPE = {"globalBatch": 8, "model": {"dim": 256, "numLayers": 3, "numHeads": 4}}


def entry(block: float, **fields: Any) -> CalibrationEntry:
    key: dict[str, Any] = {
        "device": "a",
        "width": 4,
        "float8": False,
        "compiled": False,
        "dim": 512,
        "tokens": 1024,
        "sequence_length": 256,
        "vocab_size": 4096,
        "chunk_tokens": 0,
        "checkpointing": "none",
    }
    return CalibrationEntry(key=Key(**key | fields), calibration=Calibration(block=block))


WANTED = entry(0.0).key


def hardware(calibration: Calibration | None = None) -> Hardware:
    link = load_catalogue().link("loopback")
    return Hardware(cpu_device(2, 2**34, 2), link, link, calibration, EFFICIENCY)


@pytest.mark.parametrize(
    "other", [{"device": "b"}, {"width": 2}, {"compiled": True}, {"float8": True}]
)
def test_measurements_of_another_device_or_format_are_not_used(other: dict[str, Any]) -> None:
    assert nearest([entry(2.0, **other)], WANTED) is None


def test_of_several_the_one_whose_sizes_are_nearest_is_used() -> None:
    far, near = entry(2.0, dim=4096), entry(3.0, dim=1024)
    assert nearest([far, near], WANTED) == near
    assert nearest([near, far], WANTED) == near
    same = entry(4.0)
    assert nearest([near, far, same], WANTED) == same


@pytest.mark.parametrize("other", [{"checkpointing": "full"}, {"chunk_tokens": 128}])
def test_one_with_the_same_checkpointing_and_loss_is_nearer(other: dict[str, Any]) -> None:
    assert nearest([entry(2.0, **other), entry(3.0, dim=640)], WANTED) == entry(3.0, dim=640)


def test_a_new_measurement_replaces_the_older_one_of_the_same_key() -> None:
    entries = with_entry((entry(2.0), entry(3.0, dim=64)), entry(5.0))
    assert entries == (entry(3.0, dim=64), entry(5.0))


def test_factors_multiply_the_parts_that_were_measured_and_no_other() -> None:
    work, layout = planned(make_job(recipe=RECIPE, resources={"gpu": 0}), Mesh(shard=2))
    cold = {part.what: part.seconds for part in step_time(work, layout, hardware()).parts}
    factors = Calibration(block=2.0, head=3.0, optimizer=5.0)
    warm = {part.what: part.seconds for part in step_time(work, layout, hardware(factors)).parts}
    assert warm["matrix products"] == pytest.approx(2 * cold["matrix products"])
    assert warm["attention"] == pytest.approx(2 * cold["attention"])
    assert warm["head and loss"] == pytest.approx(3 * cold["head and loss"])
    assert warm["optimizer"] == pytest.approx(5 * cold["optimizer"])


def test_the_parts_alone_are_those_of_the_step() -> None:
    """Sum on one rank: blocks x block + head + optimizer = the step."""
    job = make_job(recipe=RECIPE, nodes=(1, 1), workers=1, resources={"gpu": 0})
    work, layout = planned(job, Mesh())
    block, head = parts_alone(work, layout, hardware())
    optimizer = update_seconds(work, work.counts.total, hardware())
    whole = step_time(work, layout, hardware()).seconds
    assert 3 * block + head + optimizer == pytest.approx(whole)


def test_a_key_is_of_the_micro_batch_on_a_rank() -> None:
    work, layout = planned(make_job(recipe=RECIPE, resources={"gpu": 0}), Mesh(shard=2))
    key = key_of(work, layout, "a")
    assert key.tokens == 4 * work.sequence_length
    assert (key.width, key.dim) == (4, 256)


def test_a_description_has_day_factors_and_link() -> None:
    link = load_catalogue().link("loopback")
    text = Calibration(block=1.37, date="2026-11-25", link=link).describe()
    assert text.startswith("calibrated on 2026-11-25: blocks x 1.37, head x 1.00, optimizer x 1.00")
    assert text.endswith("link 1.50 GB/s, 60 us")
