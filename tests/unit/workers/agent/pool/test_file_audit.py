"""The agent learns which checkpoints a process writes, before they exist."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool import framework_hooks
from holdfast.workers.agent.pool.file_audit import (
    SAVES,
    STARTS_OVER,
    Earlier,
    FileAudit,
    checkpoint_of,
)

SCRIPT = """
import os, pathlib, sys, tempfile
from holdfast.workers.agent.pool import file_audit, framework_hooks
framework_hooks.install()
file_audit.install(int(sys.argv[1]))
import torch
os.makedirs("out", exist_ok=True); os.rmdir(tempfile.mkdtemp(suffix="1"))  # of a queue
torch.save({}, "out/ckpt.pt")
torch.save({}, "out/ckpt.pt")
pathlib.Path("checkpoint-5").mkdir()
torch.save({}, "checkpoint-5/optimizer.pt")
pathlib.Path("checkpoint-5/trainer_state.json").write_text("{}")
pathlib.Path("tmp").write_text("")
os.replace("tmp", "best.ckpt")
pathlib.Path("notes.txt").write_text("")
torch.save({}, "unusual")
torch.save({}, "unusual")
for name in ("next", "next", "next"):
    torch.save({}, name)
    os.replace(name, "other")
from safetensors.torch import save_file
save_file({"w": torch.zeros(1)}, "w.safetensors")
import torch.distributed.checkpoint as dcp
for _ in range(2):
    dcp.save({"w": torch.zeros(1)}, checkpoint_id="newest")
dcp.load({"w": torch.zeros(1)}, checkpoint_id="newest")
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
    assert seen == [
        "out/ckpt.pt", "out/ckpt.pt", "checkpoint-5", "best.ckpt", "unusual", "other",
        "other", "other", "w.safetensors", "newest", "newest", "nowhere/model.pth",
    ]  # fmt: skip


def test_the_hooks_and_the_audit_name_one_event() -> None:
    assert framework_hooks.SAVES == SAVES


@pytest.mark.parametrize(
    ("path", "folder", "checkpoint"),
    [
        ("/o/checkpoint-5", True, "/o/checkpoint-5"),
        ("/o/checkpoint-5/rng_state_3.pth", False, "/o/checkpoint-5"),
        ("/o/checkpoint-5/fsdp_0/__0_0.distcp", False, "/o/checkpoint-5"),
        ("/o/newest/__12_0.distcp", False, "/o/newest"),
        ("/o/newest/__0_1.distcp", False, ""),
        ("/o/step=7.ckpt", True, "/o/step=7.ckpt"),
        ("/o/21-23-11/last.pt", False, "/o/21-23-11/last.pt"),
        ("/o/21-23-11", True, "/o/21-23-11"),
        ("/o/latest", False, "/o/latest"),
        ("/o/log.txt", False, ""),
        *((f"/o/{name}", False, f"/o/{name}") for name in (
            "checkpoint.pth.tar", "ckpt.pkl", "state.safetensors", "model.bin", "last.npz",
            "weights.h5", "snapshot", "ckpt_3.tar", "epoch_3.pt.gz", "model.v2.tar",
        )),
        *((f"/o/{name}", False, "") for name in (
            "train.bin", "events.out.tfevents.1.host.2", "metrics.csv", "vocab.pkl", "model.json",
            "shard-000.tar", "ckpt.pt.A1b2", "last.log",
        )),
        ("/o/models", True, ""),
    ],
)  # fmt: skip
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
    """Raised where a process would wait for its end."""


class Start:
    """Rank 0 of a script that was started again."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *known: tuple[str, int],
        hold: bool = True,
        trains: Callable[[bool], bool] = lambda saves: True,
    ) -> None:
        self.wrote: list[tuple[str, bool, bool]] = []
        self.opened: list[str] = []
        earlier = Earlier(known, 1) or None
        self.audit = FileAudit(lambda *report: self.wrote.append(report), self.opened.append,
                               earlier, hold=hold, trains=trains)  # fmt: skip

        def ends() -> None:
            raise Ended

        monkeypatch.setattr(self.audit, "_wait", ends)

    def write(self, path: str) -> str:
        """Consequence of a write: "", a remark, or that it waits."""
        return self.see("open", path, "wb", 0)

    def see(self, event: str, *arguments: object) -> str:
        try:
            self.audit.hook(event, arguments)
        except Ended:
            return "waits"
        return "remark" if self.wrote and self.wrote[-1][1] else ""

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


def test_a_save_of_torch_under_any_name_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Start(monkeypatch, ("/o/unusual", 2)).see(SAVES, "/o/unusual") == "waits"
    assert Start(monkeypatch, ("/o/dcp", 2)).see("open", "/o/dcp/__0_0.distcp", "wb", 0) == "waits"
    renamed = Start(monkeypatch, ("/o/unusual", 2))
    assert renamed.see(SAVES, "/o/next") == "" and renamed.wrote == []
    assert renamed.see("os.rename", "/o/next", "/o/unusual", -1, -1) == "waits"


@pytest.mark.parametrize("name", ["data/train.bin", "train.bin", "vocab.pt", "metrics.csv"])
def test_data_below_the_checkpoints_directory_is_not_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An earlier start wrote it once, and each start reads it."""
    (tmp_path / "data").mkdir()
    (tmp_path / name).write_text("data")
    path = str(tmp_path / "ckpt.pt")
    start = Start(monkeypatch, (path, 2), (str(tmp_path / "vocab.pt"), 1))
    start.read(str(tmp_path / name))
    assert start.opened == [] and start.write(path) == "waits"


def test_a_checkpoint_of_the_job_in_another_directory_is_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "resume.npz"
    other.parent.mkdir()
    other.write_text("state")
    start = Start(monkeypatch, (str(tmp_path / "out/ckpt.pt"), 2), (str(other), 2))
    start.read(str(other))
    assert start.write(str(tmp_path / "out/ckpt.pt")) == ""


def test_a_checkpoint_that_is_fetched_before_the_training_is_not_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download of an object store is renamed to the path that the training saves to."""
    path, begun = tmp_path / "ckpt.pt", [False]
    fetched = tmp_path / "ckpt.pt.A1b2"
    fetched.write_text("state")
    start = Start(monkeypatch, (str(path), 2), trains=lambda saves: begun[0])
    assert start.see("os.rename", str(fetched), str(path), -1, -1) == ""
    fetched.rename(path)
    unread = Start(monkeypatch, (str(path), 2), trains=lambda saves: begun[0])
    assert unread.write(str(path)) == ""
    start.read(str(path))
    begun[0] = True
    assert start.write(str(path)) == "" and unread.write(str(path)) == "waits"


TRAINS = """
import os, sys
from holdfast.workers.agent.pool.file_audit import _trains
import torch, torch.distributed as dist
def seen():
    return _trains(False), _trains(True)
os.environ["WORLD_SIZE"] = "1"
assert seen() == (False, True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
os.environ["WORLD_SIZE"] = "2"
assert seen() == (False, False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
assert seen() == (False, True)
for _ in range(8):
    dist.barrier()
assert seen() == (True, True)
dist.destroy_process_group()
assert seen() == (False, False)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert seen() == (True, True)
"""


def test_a_process_trains_after_collectives_or_a_step_of_an_optimizer() -> None:
    subprocess.run([sys.executable, "-c", TRAINS], check=True)


def test_a_saver_that_was_forked_before_the_load_goes_by_what_the_rank_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt.pt"
    path.write_text("state")
    start = Start(monkeypatch, (str(path), 2))
    awaited, has_read = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(awaited, 1)
        os._exit(0 if start.write(str(path)) == "" else 1)
    start.read(str(path))
    os.write(has_read, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(awaited)
    os.close(has_read)
