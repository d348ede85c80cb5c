"""The agent learns which checkpoints a process writes, before they exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.file_audit import FileAudit, checkpoint_of

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
    def fails(path: str) -> None:
        raise BrokenPipeError

    audit = FileAudit(fails)
    audit.hook("open", ("/o/model.pt", "wb", 0))
    audit.hook("open", (3, "wb", 0))
    audit.hook("open", (object(), "wb", 0))
