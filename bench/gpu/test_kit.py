"""The kit itself, on CPUs: what it skips, what it leaves after a failure, and what the page has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.contestants.base import ROOT

from . import branches, kit, page
from .check import outcomes
from .kit import Folder, Kit, Machine, Measurement, Record, unmet

H100 = Machine("2.11.0+cu130", "13.0", "NVIDIA H100", 85 * kit.GB, (9, 0), "580.159")
WHERE = {"gpu": "NVIDIA H100"}


def measurement(**changes: object) -> Measurement:
    rows: dict[str, object] = {"part": "check", "name": "machine", "run": dict, "seconds": 30.0}
    return Measurement(**{**rows, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "wanted", "words"),
    [
        (H100, {}, ""),
        (Machine("2.11.0+cu130", "13.0", why="no GPU"), {}, "no GPU"),
        (
            Machine("2.11.0+cu130", "13.0", "L4", 24 * kit.GB, (8, 9)),
            {"device_gb": 40.0},
            "needs 40 GB of device memory; L4 has 24 GB",
        ),
        (
            Machine("2.11.0", "13.0", "T4", 85 * kit.GB, (7, 5)),
            {"capability": (8, 9)},
            "T4 has 7.5",
        ),
        (Machine("2.9.1+cu130", "13.0", "H100", 85 * kit.GB, (9, 0)), {}, "needs 2.11 or newer"),
        (H100, {"packages": ("not_there",)}, "not_there is not installed"),
    ],
)
def test_what_a_machine_cannot_do_is_skipped_with_the_reason(
    machine: Machine, wanted: dict[str, object], words: str, tmp_path: Path
) -> None:
    one, folder = measurement(**wanted), Folder(tmp_path)
    why = unmet(one, machine, rehearse=False)
    assert bool(why) == bool(words) and words in why
    if words:
        kit.run([one], folder, machine, minutes=1, say=lambda text: None)
        (record,) = folder.records().values()
        assert (record.outcome, record.why, record.figures) == ("skipped", why, {})


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        (None, "", "without CUDA"),
        ("13.0", "535.1", "driver 535.1 does not"),
        ("13.0", "", "no GPU"),
    ],
)
def test_the_reason_why_torch_has_no_gpu_is_named(
    cuda: str | None, driver: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kit.shutil, "which", lambda name: name if driver else None)
    done = subprocess.CompletedProcess([], 0, stdout=f"{driver}\n")
    monkeypatch.setattr(kit.subprocess, "run", lambda *a, **k: done)
    assert words in kit.describe_here().why


def test_a_failure_leaves_its_log_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def scratch(prefix: str) -> str:
        (tmp_path / prefix).mkdir()
        (tmp_path / prefix / "rank.log").write_text("words of a rank")
        return str(tmp_path / prefix)

    monkeypatch.setattr(kit.tempfile, "mkdtemp", scratch)
    chosen = [measurement(name="not one of the kit", value=0), measurement()]
    folder = Folder(tmp_path)
    kit.run(chosen, folder, H100, minutes=5, rehearse=True, say=lines.append)
    failed, done = (folder.records()["check", one.name] for one in chosen)
    assert failed.outcome == "failed" and failed.figures == {} and "ValueError" in failed.why
    log = folder.place(chosen[0], ".log").read_text()
    assert "Traceback" in log and "words of a rank" in log
    assert done.outcome == "measured" and done.figures["cores"]
    assert [one.name for one in kit.in_order(chosen, folder.records(), True)] == [chosen[0].name]
    assert len(kit.in_order(chosen, folder.records(), rehearse=False)) == 2


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path) -> None:
    lines: list[str] = []
    kit.run([measurement()], Folder(tmp_path), H100, minutes=0.1, rehearse=True, say=lines.append)
    assert "left out, needs 30 s" in lines[0] and Folder(tmp_path).records() == {}


def test_each_measurement_fits_into_one_command() -> None:
    from .parts import EVERY

    assert max(one.seconds for one in EVERY) <= kit.PART_S - 15


def test_a_measurement_finds_packages_where_the_command_does() -> None:
    words = [sys.executable, "-c", "from bench.contestants import base; print(base.PYTHONPATH)"]
    environment = {**os.environ, "PYTHONPATH": "/else"}
    assert subprocess.check_output(words, cwd=ROOT, env=environment, text=True).endswith(":/else\n")


def test_a_test_without_a_message_has_an_outcome(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text('<t><testcase classname="a.b" name="c"><failure message=""/></testcase></t>')
    assert outcomes(report)["failures"] == ["b::c: failure"]


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_what_was_not_measured_has_no_figures(outcome: kit.Outcome, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has figures"):
        Record("check", "machine", outcome, figures={"cores": 1})
    file = tmp_path / "check" / "machine.json"
    file.parent.mkdir()
    row = {"part": "check", "name": "machine", "outcome": outcome, "figures": {"cores": 1}}
    file.write_text(json.dumps(row))
    assert Folder(tmp_path).records() == {}


def test_the_page_has_figures_of_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "JSON", tmp_path / "gpu.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "gpu.md")
    folder, one = Folder(tmp_path / "records"), measurement()
    for record in (
        Record("check", "machine", "measured", figures={"cores": 77}, rehearsal=True, where=WHERE),
        Record("check", "machine", "measured", figures={"cores": 77}, where={"gpu": ""}),
        Record("check", "machine", "skipped", "no GPU", where={"gpu": ""}),
    ):
        folder.write(one, record)
        page.publish(folder)
        text = page.PAGE.read_text()
        assert "77" not in text and "**Not run" in text
    folder.write(one, Record("check", "machine", "measured", figures={"cores": 77}, where=WHERE))
    page.publish(folder)
    assert "cores: 77" in page.PAGE.read_text() and "**Not run" not in page.PAGE.read_text()
    folder.write(one, Record("check", "machine", "skipped", "a small GPU", where=WHERE))
    page.publish(folder)
    assert "cores: 77" in page.PAGE.read_text(), "a skipped one does not replace a figure"
    elsewhere = Folder(tmp_path / "another machine")
    page.unpack(elsewhere)
    assert kit.in_order([one], elsewhere.records(), rehearse=False) == []
    page.JSON.write_text('[{"part": "check", "name": "x", "outcome": "measured"}]')
    with pytest.raises(ValueError, match="not measured on a GPU"):
        page.load()


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text() == page.render(page.load())


def test_each_place_that_names_cuda_has_a_line_and_its_test_exists() -> None:
    assert sorted(branches.PLACES) == branches.places()
    for place, test in branches.PLACES.items():
        file, _, name = test.split(" (")[0].partition("::")
        if name:
            assert f"def {name}" in (ROOT / file).read_text(), f"{place}: {test}"


@pytest.mark.e2e
@pytest.mark.timeout(3000)
def test_a_rehearsal_makes_every_measurement(tmp_path: Path) -> None:
    words = ["-m", "bench.gpu", "all", "--rehearse", "--minutes", "45", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    from .parts import EVERY

    records = Folder(tmp_path).records()
    assert {(one.part, one.name) for one in EVERY} == set(records)
    assert {record.outcome for record in records.values()} <= {"measured", "skipped"}


def test_a_measurement_is_given_a_device_that_it_has() -> None:
    assert Kit(True, Path()).device == "cpu" and Kit(False, Path()).device == "cuda"
