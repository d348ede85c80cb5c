"""The founding documents: every line is answered, evidence exists, and numbers are right."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch

from holdfast.orchestrator.explorer.ranking import Alternative
from holdfast.orchestrator.explorer.search import search
from holdfast.orchestrator.planner.memory import USABLE, device_bytes
from holdfast.orchestrator.preflight.rules import RULES

from . import figures
from .claims import check_throughput
from .document import Line, all_lines, is_test, resolve, sections, short_names
from .figures import FIGURES, claimed
from .models import GB, LEAST, cluster, device, layout, nominal, planned, states_gb, work
from .page import PAGE, render
from .tables import answers, fewest_table, zero_table

LENGTHS = {
    "S": 53, "M": 30, "N": 17, "Q": 10, "K": 8, "T": 24, "R": 28, "D": 13, "F": 13, "H": 8, "E": 9,
    "X": 35,
}  # fmt: skip
"""Lines of each section of the inventory, in its order."""


# -- the page -----------------------------------------------------------------------------------
def ids() -> Iterator[str]:
    for letter, number in LENGTHS.items():
        yield from (f"{letter}{one:02}" for one in range(1, number + 1))


def test_all_248_lines_are_there_once_and_in_order() -> None:
    found = [name for section in sections() for name in section.lines]
    assert found == list(ids())
    assert len(found) == 248


def test_all_evidence_exists_in_the_repository() -> None:
    missing = []
    for name, line in all_lines().items():
        for text in line.where:
            try:
                resolve(text)
            except LookupError as error:
                missing.append(f"{name}: {error}")
    assert missing == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HANG999", "there is no file HANG999"),
        ("parallelism.sharding", "the job has no field parallelism.sharding"),
        ("tests/founding/nothing.py::test_x", "there is no file tests/founding/nothing.py"),
        ("tests/founding/page.py:nothing", "tests/founding/page.py has no nothing"),
        ("docs/index.md#nothing", "docs/index.md has no heading #nothing"),
    ],
)
def test_evidence_that_does_not_exist_is_an_error(text: str, message: str) -> None:
    with pytest.raises(LookupError, match=re.escape(message)):
        resolve(text)


def test_every_short_name_is_used_and_is_a_test() -> None:
    used = {text for line in all_lines().values() for text in line.where}
    assert set(short_names()) - used == set()
    assert [name for name in short_names() if not is_test(resolve(name))] == []


def test_a_verdict_has_the_evidence_that_it_needs() -> None:
    """Support needs a test, a number its function, a refutation one of them or a lint; whatever
    has none of these names a source."""
    weak = [name for name, line in all_lines().items() if not enough(line)]
    assert weak == []


def enough(line: Line) -> bool:
    found = [resolve(text) for text in line.where]
    tested = any(is_test(one) for one in found)
    if line.verdict == "supported":
        return tested
    if line.verdict == "computed":
        return bool(found) and (bool(line.computed) or tested)
    if line.verdict == "refuted":
        return bool(line.computed) or tested or bool(line.source)
    return bool(found) or bool(line.source)


def test_each_of_the_35_errors_is_refused_linted_or_answered() -> None:
    errors = {name: line for name, line in all_lines().items() if line.by}
    assert set(errors) == {f"X{number:02}" for number in range(1, 36)}
    for name, line in errors.items():
        found = [resolve(text) for text in line.where]
        if line.by == "linted":
            assert any(one.symbol in RULES for one in found), name
        if line.by == "refused":
            assert line.computed and any(is_test(one) for one in found), name


def test_every_function_of_the_figures_serves_a_line_and_every_number_has_one() -> None:
    used = {line.computed for line in all_lines().values() if line.computed}
    assert used - set(FIGURES) == set()
    assert set(FIGURES) - used == set()
    for name, line in all_lines().items():
        assert "{" not in line.text(), name


@pytest.mark.timeout(600)  # it searches four clusters
def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.founding.page"


# -- numbers ------------------------------------------------------------------------------------
def test_the_tables_of_zero_are_those_of_the_paper() -> None:
    """7.5 B over 64 ranks: figure 1 of the paper has 120, 31.4, 16.6 and 1.9 GB."""
    paper = figures.zero_gb(7.5, 64, figures.MIXED_BYTES)
    assert paper == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    rows = {(row.billions, row.ranks): row for row in zero_table()}
    assert rows[70, 8].paper == pytest.approx([1120, 385, 262.5, 140])
    assert rows[70, 8].own[3] == pytest.approx(140)
    assert rows[7, 8].own == pytest.approx([112, 52.5, 28, 14])
    eight = FIGURES["zero_8b_16"]()
    assert (eight["z1"], eight["z2"], eight["z3"]) == (68, 38, 8)
    seventy = FIGURES["zero_70b_8"]()
    assert [round(seventy[name]) for name in ("z1", "z2", "z3")] == [388, 265, 141]
    factors = FIGURES["zero_factors"]()
    assert factors["z1_8"] == pytest.approx(2.9, abs=0.05)
    assert factors["z2_8"] == pytest.approx(4.3, abs=0.05)
    assert factors["z1_limit"] == pytest.approx(4, rel=1e-4)
    assert factors["z2_limit"] == pytest.approx(8, rel=1e-4)


def test_hybrid_shard_of_70b_over_eight_gpus_needs_141_gb_each() -> None:
    found, have = FIGURES["hybrid_70b_8x8"](), device("H100-80").memory_bytes / GB
    assert found["states"] == pytest.approx(141.1, abs=0.05)
    assert found["needs"] > found["states"] > have
    assert found["safe"] == 32
    assert found["needs_safe"] <= USABLE * have
    assert states_gb(work("llama3-70b"), 32, 2) == pytest.approx(35.3, abs=0.05)
    assert states_gb(work("llama3-70b"), 64) == pytest.approx(17.6, abs=0.05)
    assert states_gb(work("llama3-70b"), 8, 8) == states_gb(work("llama3-70b"), 8)


def test_the_fewest_devices_are_those_that_the_rule_of_16_bytes_gives() -> None:
    """None of the four numbers of the document holds the states."""
    for row in fewest_table():
        assert row.document_needs > row.have, row.model
        assert row.peak <= USABLE * row.have
        states = row.host / row.number
        assert states < row.peak < states + 0.45 * row.have
    numbers = {row.model: row.number for row in fewest_table()}
    assert numbers["llama3-70b"] == 24
    assert math.ceil(16 * 70.55e9 / (USABLE * 80e9)) == 18  # for states alone


@pytest.mark.timeout(600)  # it searches four clusters
def test_each_scenario_has_its_verdict_and_what_fits() -> None:
    found = {answer.scenario.id: answer for answer in answers()}
    fits = {name: answer.fits for name, answer in found.items()}
    assert fits == {
        "R12": False, "R13": True, "R14": False, "R15": False, "R16": True, "R17": False
    }  # fmt: skip
    one = found["R12"]  # 7 B, four A100: DDP cannot, FSDP over the four can
    assert one.needs > one.have
    assert one.without_offload is not None and copy_size(one.without_offload) > 1
    lost = {other.strategy for other in planned("llama2-7b", "4xA100-80").lost}
    assert "DDP" in lost
    three = found["R14"]  # 70 B, eight H100: only with offload to main memory
    assert three.needs > 141 and three.without_offload is None
    assert three.best is not None and three.best.settings["offload"] == "cpu"
    four = found["R15"]  # 70 B, 64 H100: a copy lies on more than a node
    assert four.needs > four.have
    assert four.without_offload is not None and copy_size(four.without_offload) > 8
    five = found["R16"]
    assert five.best is not None and "offload" not in five.best.settings
    assert found["R17"].best is None
    for answer in answers():
        if answer.best is not None:
            assert answer.best.peak_bytes <= USABLE * answer.have * GB


def copy_size(one: Alternative) -> int:
    """Devices that share one copy of the model."""
    return one.mesh.world_size // one.mesh.replicate


@pytest.mark.parametrize(("name", "times"), [("F02", 16.5), ("F03", 3.36), ("F04", 1.77)])
def test_throughput_above_the_peak_of_the_devices_is_refused(name: str, times: float) -> None:
    job, number, kind, tokens = claimed(name)
    with pytest.raises(ValueError, match="at their peak, without a pause, they compute"):
        check_throughput(job, number, device(kind), tokens)
    found = FIGURES["throughput"]()
    assert found[f"{name}_share"] == pytest.approx(times, rel=0.02)
    ordinary = check_throughput(job, number, device(kind), found[f"{name}_ordinary"])
    assert ordinary.share == pytest.approx(0.45)


def test_eight_h100_cost_650_dollars_a_day() -> None:
    found = FIGURES["price"]()
    assert found["hour"] == pytest.approx(27.12)
    assert found["day"] == pytest.approx(650.88)
    assert found["three_days"] == pytest.approx(1952.64)


def test_ddp_and_fsdp_send_the_same_bytes() -> None:
    found = FIGURES["traffic"]()
    elements = [found[f"{name}_elements"] for name in ("ddp", "zero2", "fsdp")]
    assert elements == pytest.approx([2, 2, 3])
    assert found["ddp_bytes"] == found["fsdp_bytes"] == pytest.approx(8)
    assert found["fsdp_half_bytes"] == pytest.approx(6)
    assert (found["zero2_bytes"], found["zero2_half_bytes"]) == pytest.approx((6, 4))
    assert found["fsdp_gb"] == pytest.approx(490)
    hybrid = FIGURES["hybrid_traffic"]()
    assert hybrid["hybrid_network"] < hybrid["full_network"] / 8


def test_the_exercises_have_the_answers_of_the_planner() -> None:
    one = FIGURES["exercise_1"]()
    assert one["ddp"] == pytest.approx(208, abs=0.5) and one["full"] == pytest.approx(26, abs=0.1)
    assert one["peak"] <= USABLE * one["have"] < one["ddp"]
    three = FIGURES["exercise_3"]()
    assert three["b8"] <= USABLE * three["have"]
    assert three["b70"] > three["have"] and three["wide"] <= USABLE * three["have"]
    four = FIGURES["buckets"]()
    assert four["ms100"] - four["ms5"] < 1 < four["ms1"] / 1000
    assert four["states"] == pytest.approx(128.5, abs=0.1)
    assert 190 < FIGURES["exercise_6"]()["millions"] < 210
    bubble = FIGURES["bubble"]()
    for micro in (4, 8, 32):
        assert bubble[f"m{micro}"] == pytest.approx(bubble[f"formula_m{micro}"], rel=1e-6)


def test_activation_checkpointing_saves_nine_tenths_for_a_third_of_the_time() -> None:
    found = FIGURES["checkpointing"]()
    assert 0.85 < found["full_saved"] < 0.97
    assert 0.2 < found["full_more"] <= 1 / 3
    assert 0.3 < found["nth_saved"] < 0.5
    assert found["nth_more"] == pytest.approx(found["full_more"] / 2, rel=0.05)
    assert 0 < found["selective_more"] < 0.05 < found["selective_saved"]
    claimed_saving = 1 - 14 / 50  # "90 %" of document C
    assert claimed_saving == pytest.approx(0.72)


def test_figures_of_the_documents_are_right_or_corrected() -> None:
    states = FIGURES["model_states"]()
    assert [states[f"b{n}"] for n in (7, 13, 70, 175)] == [112, 208, 1120, 2800]
    assert states["llama70"] == pytest.approx(1129, abs=0.5)
    itemised = FIGURES["itemised_70b"]()
    assert itemised["document_total"] == 1170 and itemised["total"] == 1120
    layer = FIGURES["layer_8b"]()
    assert layer["tensor_mb"] == pytest.approx(16.8, abs=0.03)
    assert layer["inputs_gb"] == pytest.approx(0.54, abs=0.005)
    assert 300 < layer["layer_mb"] < 500
    eight_bit = FIGURES["eight_bit_70b"]()
    assert eight_bit["document"] == 714
    assert eight_bit["moments"] == pytest.approx(143, abs=1)
    adapters = FIGURES["adapters_70b"]()
    assert adapters["nf4"] < USABLE * adapters["have"] < adapters["bf16"]
    assert FIGURES["one_gpu_8b"]()["states_1"] > FIGURES["one_gpu_8b"]()["have"]
    assert search(work("llama3-8b"), cluster("1xH100-80")).ranked == ()
    drop = FIGURES["sharded_states"]()["drop_8_to_128"] * GB / 2**30
    assert drop == pytest.approx(14.0, abs=0.05)  # TorchTitan measured 15.0 to 15.4 GiB
    smaller = FIGURES["ddp_against_fsdp"]()
    assert smaller["peak"] <= USABLE * device("A100-80").memory_bytes / GB
    assert abs(smaller["more"]) < 0.2


def test_a_matrix_that_is_split_by_columns_or_rows_gives_the_whole_product() -> None:
    """Document C's example, with whole numbers: no rounding hides an error."""
    torch.manual_seed(0)
    x_bi = torch.randint(-8, 8, (16, 4096), dtype=torch.float64)
    w_io = torch.randint(-8, 8, (4096, 4096), dtype=torch.float64)
    whole = x_bi @ w_io
    by_columns = torch.cat([x_bi @ w_io[:, :2048], x_bi @ w_io[:, 2048:]], dim=1)
    by_rows = x_bi[:, :2048] @ w_io[:2048] + x_bi[:, 2048:] @ w_io[2048:]
    assert torch.equal(whole, by_columns) and torch.equal(whole, by_rows)


def test_a_round_number_of_parameters_has_the_states_of_its_size() -> None:
    """The nominal models are only for states and traffic; their states follow 16 bytes."""
    assert states_gb(nominal(70), 8) == pytest.approx(140)
    assert device_bytes(work("llama3-70b"), layout(8, **LEAST)) > 141e9
