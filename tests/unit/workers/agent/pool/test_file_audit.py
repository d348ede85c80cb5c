"""The agent learns which checkpoints a process writes, before they exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.file_audit import STARTS_OVER, Earlier, FileAudit, checkpoint_of

SCRIPT = """
import os, pathlib, sys
from holdfast.workers.agent.pool import file_audit, framework_hooks
framework_hooks.install()
file_audit.install(int(sys.argv[1]))
import torch
os.makedirs("out", exist_ok=True)
torch.save({}, "out/ckpt.pt")
torch.save({}, "out/ckpt.pt")
pathlib.Path("checkpoint-5").mkdir()
torch.save({}, "checkpoint-5/optimizer.pt")
pathlib.Path("checkpoint-5/trainer_state.json").write_text("{}")
pathlib.Path("tmp").write_text("")
os.replace("tmp", "best.ckpt")
pathlib.Path("notes.txt").write_text("")
open("best.ckpt").close()
try:
    open("nowhere/model.pth", "wb")
except FileNotFoundError:
    pass
"""


def test_what_a_process_writes_is_reported_each_time(tmp_path: Path) -> None:
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), cwd=tmp_path, check=True,
        )  # fmt: skip
        theirs.close()
        seen = []
        while (message := worker_transport.receive(ours)[0]) is not None:
            assert isinstance(message, worker_protocol.CheckpointWritten)
            seen.append(str(Path(message.path).relative_to(tmp_path)))
    assert seen == ["out/ckpt.pt", "out/ckpt.pt", "checkpoint-5", "best.ckpt", "nowhere/model.pth"]


@pytest.mark.parametrize(
    ("path", "folder", "checkpoint"),
    [
        ("/o/checkpoint-5", True, "/o/checkpoint-5"),
        ("/o/checkpoint-5/rng_state_3.pth", False, "/o/checkpoint-5"),
        ("/o/checkpoint-5/fsdp_0/__0_0.distcp", False, "/o/checkpoint-5"),
        ("/o/step=7.ckpt", True, "/o/step=7.ckpt"),
        ("/o/21-23-11/last.pt", False, "/o/21-23-11/last.pt"),
        ("/o/21-23-11", True, "/o/21-23-11"),
        ("/o/latest", False, "/o/latest"),
        ("/o/log.txt", False, ""),
        ("/o/models", True, ""),
    ],
)
def test_the_checkpoint_that_a_file_belongs_to(path: str, folder: bool, checkpoint: str) -> None:
    expected = Path(checkpoint) if checkpoint else None
    assert checkpoint_of(Path(path), folder=folder) == expected


def test_a_script_runs_on_although_the_agent_has_ended() -> None:
    def fails(path: str, unread: bool, waits: bool) -> None:
        raise BrokenPipeError

    audit = FileAudit(fails)
    audit.hook("open", ("/o/model.pt", "wb", 0))
    audit.hook("open", (3, "wb", 0))
    audit.hook("open", (object(), "wb", 0))


class Ended(BaseException):
    """In place of the end of a process that waits for it."""


class Start:
    """Rank 0 of a script that was started again."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *known: tuple[str, int], hold: bool = True
    ) -> None:
        self.wrote: list[tuple[str, bool, bool]] = []
        self.opened: list[str] = []
        earlier = Earlier(known, 1) or None
        self.audit = FileAudit(lambda *one: self.wrote.append(one), self.opened.append, earlier,
                               hold=hold)  # fmt: skip

        def ends() -> None:
            raise Ended

        monkeypatch.setattr(self.audit, "_wait", ends)

    def write(self, path: str) -> str:
        """What follows: "", a remark, or that it waits."""
        try:
            self.audit.hook("open", (path, "wb", 0))
        except Ended:
            return "waits"
        return "remark" if self.wrote[-1][1] else ""

    def read(self, path: str) -> None:
        self.audit.hook("open", (path, "rb", 0))


def test_a_script_that_begins_at_step_0_waits_before_it_overwrites_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "ckpt.pt")
    start = Start(monkeypatch, (path, 2))
    start.read(__file__)
    assert start.write(path) == "waits" and start.wrote == [(path, True, True)]
    assert Start(monkeypatch, (path, 2), hold=False).write(path) == "remark"


def test_a_script_may_begin_at_step_0_by_its_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, ("/o/ckpt.pt", 2))
    start.audit.hook(STARTS_OVER, ())
    assert start.write("/o/ckpt.pt") == ""


@pytest.mark.parametrize(
    ("known", "written", "then"),
    [
        (["/o/checkpoint-40", "/o/checkpoint-80"], "/o/checkpoint-40/model.pt", "waits"),
        (["/o/checkpoint-40", "/o/checkpoint-80"], "/o/checkpoint-80/model.pt", "waits"),
        (["/o/checkpoint-40", "/o/checkpoint-80"], "/o/checkpoint-120/model.pt", ""),
        (["/o/checkpoint-40"], "/o/checkpoint-40/model.pt", ""),
        (["/o/epoch_1.pt", "/o/epoch_2.pt"], "/o/epoch_1.pt", "waits"),
        (["/o/a/epoch_1.pt", "/o/a/epoch_2.pt"], "/o/b/epoch_1.pt", "remark"),
        (["/o/part_1.pt", "/o/part_2.pt"], "/o/part_1.pt", ""),
        (["/o/shard1", "/o/shard2"], "/o/shard1/a.pt", ""),
        (["/o/vocab.pt"], "/o/vocab.pt", ""),
    ],
)
def test_only_what_was_saved_again_and_again_is_the_state(
    monkeypatch: pytest.MonkeyPatch, known: list[str], written: str, then: str
) -> None:
    assert Start(monkeypatch, *((path, 1) for path in known)).write(written) == then


@pytest.mark.parametrize("name", ["ckpt.pt", "state.json", "optimizer/shard.bin"])
def test_a_script_that_reads_its_state_in_any_format_has_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / name).write_text("state")
    path = str(tmp_path / "ckpt.pt")
    start = Start(monkeypatch, (path, 2))
    start.read(str(tmp_path / name))
    assert start.opened == [str(tmp_path / name)]
    assert start.write(path) == "" and start.wrote == [(path, False, False)]


def test_a_log_or_a_module_beside_the_checkpoint_is_not_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.log", "model.py"):
        (tmp_path / name).write_text("")
    start = Start(monkeypatch, (str(tmp_path / "ckpt.pt"), 2))
    for name in ("train.log", "model.py", "missing.bin"):
        start.read(str(tmp_path / name))
    assert start.opened == []
