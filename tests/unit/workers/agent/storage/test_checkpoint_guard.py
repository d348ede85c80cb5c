"""Incomplete checkpoints of frameworks are set aside; complete and older ones are not touched."""

from __future__ import annotations

import json
import os
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.workers.agent.pool.file_audit import checkpoint_of
from holdfast.workers.agent.storage import checkpoint_guard, script_checkpoints
from holdfast.workers.agent.storage.checkpoint_guard import ASIDE, MAX_ENTRIES, look, roots
from tests.documents import job_document

DAY_NS = 86_400 * 10**9


def seen(
    where: list[Path], since_ns: int, own: tuple[int, int, int] = (0, 1, 1)
) -> checkpoint_guard.Findings:
    """A look after ranks of the job wrote all that is there."""
    paths = (path for root in where for path in root.rglob("*") if ASIDE not in str(path))
    checkpoints = (checkpoint_of(path, folder=path.is_dir()) for path in paths)
    return look([], since_ns, own, sorted({path for path in checkpoints if path is not None}))


def torch_file(path: Path) -> None:
    """A zip file, as torch.save writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", b"x" * 200)
        file.writestr("archive/data/0", os.urandom(3000))


def safetensors(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"y" * 32)


def transformers(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    safetensors(path / "model.safetensors")
    torch_file(path / "training_args.bin")
    torch_file(path / "optimizer.pt")
    torch_file(path / "scheduler.pt")
    torch_file(path / "rng_state_0.pth")
    (path / "trainer_state.json").write_text('{"global_step": 5}')


def accelerate(path: Path) -> None:
    path.mkdir(parents=True)
    safetensors(path / "model.safetensors")
    torch_file(path / "optimizer.bin")
    (path / "random_states_0.pkl").write_bytes(b"r")
    (path / "custom_checkpoint_0.pkl").write_bytes(b"c")


def dcp(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"d")
    (path / ".metadata").write_bytes(b"m")


def tag(path: Path) -> None:
    torch_file(path / "mp_rank_00_model_states.pt")
    for rank in (0, 1):
        torch_file(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def emptied(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


Break = Callable[[Path], None]
BREAKS: dict[str, tuple[Callable[[Path], None], str, Break]] = {
    "nothing-written": (transformers, "checkpoint-", emptied),
    "no-state": (transformers, "checkpoint-", lambda p: (p / "trainer_state.json").unlink()),
    "torn-state": (transformers, "checkpoint-", lambda p: cut(p / "trainer_state.json")),
    "torn-weights": (transformers, "checkpoint-", lambda p: cut(p / "model.safetensors")),
    "no-weights": (transformers, "checkpoint-", lambda p: (p / "model.safetensors").unlink()),
    "torn-optimizer": (transformers, "checkpoint-", lambda p: cut(p / "optimizer.pt")),
    "sentinel": (
        transformers,
        "checkpoint-",
        lambda p: (p / "checkpoint-is-incomplete.txt").touch(),
    ),
    "no-random-states": (accelerate, "checkpoint_", lambda p: (p / "random_states_0.pkl").unlink()),
    "no-custom": (accelerate, "checkpoint_", lambda p: (p / "custom_checkpoint_0.pkl").unlink()),
    "torn-model": (accelerate, "checkpoint_", lambda p: cut(p / "model.safetensors")),
    "no-metadata": (dcp, "step-", lambda p: (p / ".metadata").unlink()),
}


@pytest.mark.parametrize("case", BREAKS)
def test_the_newest_incomplete_directory_is_set_aside_and_the_one_before_is_found(
    tmp_path: Path, case: str
) -> None:
    make, prefix, broken = BREAKS[case]
    out = tmp_path / "out"
    for number in (5, 20, 100):
        make(out / f"{prefix}{number}")
    assert seen([tmp_path], 0).newest is not None
    broken(out / f"{prefix}100")
    findings = seen([tmp_path], 0)
    assert names(out) == sorted([f"{prefix}20", f"{prefix}5"])
    assert names(tmp_path / "out.incomplete") == [f"{prefix}100-1.incomplete"]
    assert len(findings.set_aside) == 1 and f"{prefix}100 is incomplete" in findings.set_aside[0]
    assert findings.newest is not None and findings.newest[1] == out / f"{prefix}20"
    assert not seen([tmp_path], 0).set_aside


@pytest.mark.parametrize("make", [transformers, accelerate, dcp])
def test_complete_checkpoints_stay_and_the_newest_is_named(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    for number in (5, 10):
        make(tmp_path / f"checkpoint-{number}")
    before = names(tmp_path)
    findings = seen([tmp_path], 0)
    assert (names(tmp_path), findings.set_aside) == (before, [])
    assert findings.newest is not None and findings.newest[1] == tmp_path / "checkpoint-10"


def test_one_folder_of_dcp_that_ranks_write_again_and_again_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    dcp(path)
    os.utime(path / "__0_0.distcp", (5, 5))
    findings = look([], 0, written=[path])
    assert findings.newest is not None and findings.newest[1] == path and not findings.set_aside
    os.utime(path / ".metadata", (5, 5))
    (path / "__0_0.distcp").write_bytes(b"begun again")
    assert not look([tmp_path], 0).set_aside, "no rank has written it"
    (text,) = look([], 0, written=[path]).set_aside
    assert "__0_0.distcp is newer than .metadata" in text and not path.exists()


@pytest.mark.parametrize("make", [transformers, torch_file])
def test_a_checkpoint_with_which_a_start_failed_comes_after_an_older_one(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    end = ".pt" if make is torch_file else ""
    paths = [tmp_path / f"checkpoint-{number}{end}" for number in (10, 20, 30)]
    for age, path in enumerate(reversed(paths)):
        make(path)
        for file in (path, *path.glob("*")):
            os.utime(file, (1000 - age, 1000 - age))
    findings = look([], 0, written=paths, failed=[paths[2]])
    assert findings.newest is not None and findings.newest[1] == paths[1]
    assert [path for _, path in findings.passed_over] == [paths[2]]
    findings = look([], 0, written=paths, failed=paths)
    assert findings.newest is not None and findings.newest[1] == paths[2], "there is no other"
    assert not findings.set_aside


def test_what_was_written_before_the_job_is_not_touched(tmp_path: Path) -> None:
    transformers(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    torch_file(tmp_path / "old.ckpt")
    cut(tmp_path / "old.ckpt")
    findings = seen([tmp_path], time.time_ns() + DAY_NS)
    assert (names(tmp_path), findings.set_aside, findings.newest) == (
        ["checkpoint-5", "old.ckpt"],
        [],
        None,
    )


def test_a_torn_file_of_torch_save_is_set_aside(tmp_path: Path) -> None:
    for name in ("epoch=1.ckpt", "last.ckpt"):
        torch_file(tmp_path / "lightning" / name)
    cut(tmp_path / "lightning" / "last.ckpt")
    findings = seen([tmp_path], 0)
    assert names(tmp_path / "lightning") == ["epoch=1.ckpt"]
    assert "ends in the middle" in findings.set_aside[0]
    assert findings.newest is not None and findings.newest[1].name == "epoch=1.ckpt"


def test_a_link_to_a_file_that_was_set_aside_is_set_aside_too(tmp_path: Path) -> None:
    torch_file(tmp_path / "a" / "epoch=2.ckpt")
    (tmp_path / "a" / "last.ckpt").symlink_to("epoch=2.ckpt")
    cut(tmp_path / "a" / "epoch=2.ckpt")
    seen([tmp_path], 0)
    assert names(tmp_path / "a") == [], "in one look"


def test_a_link_to_a_folder_that_was_set_aside_is_set_aside_too(tmp_path: Path) -> None:
    """The link of Lightning with FSDP, also from another folder."""
    for step in (1, 2):
        dcp(tmp_path / "a" / f"step={step}.ckpt")
    (tmp_path / "a" / "last.ckpt").symlink_to("step=2.ckpt")
    (tmp_path / "newest.ckpt").symlink_to("a/step=2.ckpt")
    (tmp_path / "a" / "step=2.ckpt" / ".metadata").unlink()
    seen([tmp_path], 0)
    assert names(tmp_path / "a") == ["step=1.ckpt"]
    assert not (tmp_path / "newest.ckpt").is_symlink()


def test_a_link_from_before_the_job_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("nowhere.ckpt")
    seen([tmp_path], time.time_ns() + DAY_NS)
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("make", [transformers, accelerate, dcp, tag, torch_file])
def test_a_file_that_may_be_a_cache_is_named_only_without_a_checkpoint(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    cache = tmp_path / "tokenized_cache.pt"
    torch_file(cache)
    findings = seen([tmp_path], 0)
    assert findings.newest is not None and findings.newest[1] == cache
    own = tmp_path / "out" / ("checkpoint-10" if make is not torch_file else "epoch=1.ckpt")
    make(own)
    if make is tag:
        (tmp_path / "out" / "latest").write_text(own.name)
    os.utime(cache, ns=(time.time_ns() + DAY_NS, time.time_ns() + DAY_NS))
    findings = seen([tmp_path], 0)
    assert findings.newest is not None
    assert findings.newest[1] == (own.parent if make is tag else own)


@pytest.mark.parametrize(
    ("resumed", "other"),
    [
        ("last.pt", "best.pt"),
        ("checkpoint.pth.tar", "model_best.pth.tar"),
        ("ckpt.pkl", "ema.pkl"),
        ("model_3.pt", "final.pt"),
        ("model.pt", "optim.pt"),
        ("checkpoint_last.pt", "checkpoint_best.pt"),
        ("epoch_2.pt", "epoch_1.pt"),
        ("snapshot", "model.bin"),
    ],
)
def test_a_script_resumes_from_its_state_rather_than_from_an_exported_model(
    tmp_path: Path, resumed: str, other: str
) -> None:
    """Each save writes the state first, so that it is the older one."""
    for name in (resumed, other):
        torch_file(tmp_path / name)
    ages = (0, 60) if resumed.startswith("epoch") else (2, 0)
    now_ns = time.time_ns()
    for name, age_s in zip((resumed, other), ages, strict=True):
        os.utime(tmp_path / name, ns=(now_ns - age_s * 10**9,) * 2)
    newest = look([], 0, written=[tmp_path / other, tmp_path / resumed]).newest
    assert newest is not None and newest[1] == tmp_path / resumed


@pytest.mark.parametrize("age_s", [2, 600])
def test_the_larger_file_of_one_save_comes_first(tmp_path: Path, age_s: int) -> None:
    torch_file(tmp_path / "small.pt")
    (tmp_path / "large.pt").write_bytes(b"x" * 9000)
    then_ns = time.time_ns() - age_s * 10**9
    os.utime(tmp_path / "large.pt", ns=(then_ns, then_ns))
    for written in (["large.pt", "small.pt"], ["small.pt", "large.pt"]):
        newest = look([], 0, written=[tmp_path / name for name in written]).newest
        assert newest is not None
        assert newest[1].name == ("large.pt" if age_s == 2 else "small.pt")


@pytest.mark.parametrize("damage", ["torn", "missing", "empty latest"])
def test_latest_of_deepspeed_names_the_newest_complete_tag(tmp_path: Path, damage: str) -> None:
    for number in (5, 10):
        tag(tmp_path / f"global_step{number}")
        os.utime(tmp_path / f"global_step{number}", ns=(number * 10**9, number * 10**9))
    latest, newest = tmp_path / "latest", tmp_path / "global_step10"
    latest.write_text("global_step10")
    assert not seen([tmp_path], 0).set_aside
    if damage == "torn":
        cut(newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    elif damage == "missing":
        (newest / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    else:
        latest.write_text("")
        cut(newest / "mp_rank_00_model_states.pt")
    findings = seen([tmp_path], 0)
    assert latest.read_text() == "global_step5"
    assert "latest names global_step5 now" in findings.set_aside[0]
    assert newest.is_dir()


def test_it_is_known_how_many_ranks_wrote_the_newest_checkpoint_of_deepspeed(
    tmp_path: Path,
) -> None:
    tag(tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step5")
    assert seen([tmp_path], 0).divided == (tmp_path / "global_step5", 2)
    for rank in (0, 1):  # of two ranks of model parallelism
        torch_file(tmp_path / "global_step5" / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt")
    assert seen([tmp_path], 0).divided == (tmp_path / "global_step5", 4)
    torch_file(tmp_path / "whole" / "step" / "mp_rank_00_model_states.pt")
    (tmp_path / "whole" / "latest").write_text("step")
    findings = seen([tmp_path / "whole"], 0)
    assert findings.newest is not None and findings.divided is None, "ZeRO did not divide it"


def test_without_a_complete_tag_latest_is_set_aside(tmp_path: Path) -> None:
    tag(tmp_path / "ds" / "global_step5")
    (tmp_path / "ds" / "latest").write_text("global_step5")
    cut(tmp_path / "ds" / "global_step5" / "mp_rank_00_model_states.pt")
    seen([tmp_path], 0)
    assert names(tmp_path / "ds") == ["global_step5"]


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run2"
    transformers(run / "checkpoint-5")
    (run / "trainer_state.json").write_text("{}")
    (tmp_path / "data1").mkdir()
    (tmp_path / "data1" / "part.bin").write_bytes(b"")
    assert not seen([tmp_path], 0).set_aside
    assert names(run) == ["checkpoint-5", "trainer_state.json"]


def test_a_save_that_is_killed_anywhere_leaves_a_complete_newest_checkpoint(tmp_path: Path) -> None:
    """100 kill points: the files up to one of them, of which the last is cut anywhere."""
    random.seed(1)
    transformers(tmp_path / "whole")
    order = ("config.json", "model.safetensors", "training_args.bin", "optimizer.pt",
             "scheduler.pt", "rng_state_0.pth", "trainer_state.json")  # fmt: skip
    for number in range(1, 101):
        out = tmp_path / f"case-{number}x"
        transformers(out / "checkpoint-5")
        torn = out / "checkpoint-10"
        torn.mkdir()
        done = random.randrange(len(order))
        for name in order[: done + 1]:
            (torn / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        last = torn / order[done]
        last.write_bytes(last.read_bytes()[: random.randrange(last.stat().st_size)])
        findings = seen([out], 0)
        assert names(out) == ["checkpoint-5"], (done, last.stat().st_size)
        assert findings.newest is not None and findings.newest[1] == out / "checkpoint-5"


def test_two_nodes_on_one_file_system_set_it_aside_once(tmp_path: Path) -> None:
    dcp(tmp_path / "c" / "step-1")
    assert checkpoint_guard._moved(tmp_path / "c" / "step-1") is not None
    assert checkpoint_guard._moved(tmp_path / "c" / "step-1") is None


def test_the_look_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 500):
        (tmp_path / f"file{number}.txt").touch()
    begin = time.monotonic()
    findings = look([tmp_path], 0)
    assert findings.num_entries == MAX_ENTRIES and "more than" in findings.cut_short
    assert time.monotonic() - begin < 1.0


RANKS, EACH = 64, 4


def many_ranks(directory: Path) -> Path:
    """A checkpoint of so many ranks that a node does not open the files of all of them."""
    newest = directory / "global_step5"
    torch_file(newest / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        torch_file(newest / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (directory / "latest").write_text("global_step5")
    return newest


@pytest.mark.parametrize("ranks", [RANKS, RANKS // 2])
def test_all_nodes_together_open_the_files_of_all_ranks(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the nodes suffice after the others were lost."""
    newest = many_ranks(tmp_path)
    opened: list[str] = []
    torn = script_checkpoints.torn

    def noted(path: Path) -> str:
        opened.append(path.name)
        return torn(path)

    monkeypatch.setattr(script_checkpoints, "torn", noted)
    for first in range(0, ranks, EACH):
        before = len(opened)
        seen([tmp_path], 0, (first, EACH, ranks))
        assert EACH <= len(opened) - before <= RANKS // ranks * EACH + 2 * script_checkpoints.FEW
    assert set(opened) == set(names(newest))


def test_one_of_the_nodes_finds_the_torn_file_of_a_rank(tmp_path: Path) -> None:
    newest = many_ranks(tmp_path)
    cut(newest / "zero_pp_rank_41_mp_rank_00_optim_states.pt")
    assert seen([tmp_path], 0, (40, EACH, RANKS)).set_aside


def test_after_its_time_a_look_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system begins to answer slowly in the middle of a checkpoint."""
    transformers(tmp_path / "checkpoint-5")
    cut(tmp_path / "checkpoint-5" / "optimizer.pt")
    now, torn = [0.0], script_checkpoints.torn

    def slowly(path: Path) -> str:
        now[0] += checkpoint_guard.LOOK_TIMEOUT_S
        return torn(path)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script_checkpoints, "torn", slowly)
    findings = seen([tmp_path], 0)
    assert (names(tmp_path), findings.set_aside) == (["checkpoint-5"], [])
    assert "did not answer within 5 s" in findings.cut_short


def test_arguments_of_the_script_name_directories(tmp_path: Path) -> None:
    def job(**checkpoint: object) -> list[Path]:
        args = ["--output_dir", "out", "--ckpt=saved", "--lr", "0.1", "missing"]
        return roots(
            job_from_mapping(job_document("a", {
                    "entrypoint": {"script": "t.py", "args": args},
                    "checkpoint": checkpoint,
                })),
            str(tmp_path),
        )  # fmt: skip

    (tmp_path / "out").mkdir()
    (tmp_path / "saved").mkdir()
    assert job() == [tmp_path / "out", tmp_path / "saved"]
    assert job(guard={"directories": ["deep/down"]}) == [tmp_path / "deep/down"]


def test_what_another_job_writes_below_the_same_directory_is_neither_touched_nor_named(
    tmp_path: Path,
) -> None:
    """Two runs of a sweep, of which the other one is in the middle of a save."""
    own, other = tmp_path / "out" / "lr-a", tmp_path / "out" / "lr-b"
    for number in (40, 80):
        transformers(own / f"checkpoint-{number}")
    cut(own / "checkpoint-80" / "optimizer.pt")
    transformers(other / "checkpoint-40")
    (other / "checkpoint-80").mkdir()
    (other / "checkpoint-80" / "config.json").write_text("{}")
    torch_file(tmp_path / "model.pth")
    cut(tmp_path / "model.pth")
    written = [own / "checkpoint-40", own / "checkpoint-80"]
    findings = look([own, tmp_path / "out"], 0, written=written)
    assert names(other) == ["checkpoint-40", "checkpoint-80"] and names(own) == ["checkpoint-40"]
    assert names(tmp_path) == ["model.pth", "out"]
    assert findings.newest is not None and findings.newest[1] == own / "checkpoint-40"


def test_a_named_directory_in_which_no_rank_wrote_may_be_another_jobs(tmp_path: Path) -> None:
    torch_file(tmp_path / "teacher" / "model.ckpt")
    assert look([tmp_path / "teacher"], 0, named=False).newest is None
    assert look([tmp_path / "teacher"], 0, named=True).newest is not None


def test_a_file_that_a_process_writes_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch_file(path)
    cut(path)
    with path.open("ab"):
        findings = look([tmp_path], 0)
    assert path.exists() and f"process {os.getpid()} has it open" in findings.set_aside[0]
    look([tmp_path], 0)
    assert not path.exists()


def test_a_folder_that_still_grows_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    later = tmp_path / "checkpoint-5" / "scheduler.pt"
    monkeypatch.setattr(time, "sleep", lambda _s: later.write_bytes(b"more"))
    findings = look([tmp_path], 0)
    assert names(tmp_path) == ["checkpoint-5"] and "it still grows" in findings.set_aside[0]


@pytest.mark.parametrize("make", [torch_file, dcp])
def test_what_another_program_wrote_a_moment_ago_stays_as_it_is(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A download from another node that pauses: no process has it open here."""
    path = tmp_path / ("base.ckpt" if make is torch_file else "step-1")
    make(path)
    if make is torch_file:
        cut(path)
    else:
        (path / ".metadata").unlink()
    for age_s in (0, 50, -DAY_NS // 10**9):
        for file in (path, *path.glob("*")):
            os.utime(file, ns=(time.time_ns() - age_s * 10**9,) * 2)
        (said,) = look([tmp_path], 0, named=False).set_aside
        assert path.exists() and "s ago, and not by a rank of this job" in said
    for file in (path, *path.glob("*")):
        os.utime(file, ns=(time.time_ns() - 70 * 10**9,) * 2)
    look([tmp_path], 0, named=False)
    assert not path.exists()
