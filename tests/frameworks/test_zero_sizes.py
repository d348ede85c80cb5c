"""A checkpoint of ZeRO is read by another number of ranks than wrote it, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .catalogue import SCRIPTS, environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONVERTED = ".holdfast-universal"


def run(place: Path, what: str, ranks: int, stage: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), "zero_resized.py", what, "--out", str(place / "out"),
            "--state", str(place / f"{what}.pt"), "--stage", str(stage),
        ],
        cwd=SCRIPTS, env=os.environ | environment(place, 0), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("stage, before, after", [(1, 2, 3), (2, 3, 2)])
def test_parameters_and_optimizer_are_the_same_in_another_number_of_ranks(
    stage: int, before: int, after: int, tmp_path: Path
) -> None:
    import torch

    saved = run(tmp_path, "save", before, stage)
    assert saved.returncode == 0, saved.stderr[-3000:]
    (tmp_path / "out" / "latest").write_text("three")
    assert not (tmp_path / "out" / CONVERTED).exists()
    loaded = run(tmp_path, "load", after, stage)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert f"it is converted for {after}" in loaded.stderr
    wanted, got = (torch.load(tmp_path / f"{what}.pt") for what in ("save", "load"))
    assert wanted.keys() == got.keys()
    for name in wanted:
        for kind in wanted[name]:
            assert torch.equal(wanted[name][kind], got[name][kind]), f"{name}: {kind}"
    # The next start at that size reads what it has written by itself.
    parts = [path.name for path in (tmp_path / "out" / "after-load").glob("*_optim_states.pt")]
    assert len(parts) == after


def test_a_checkpoint_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, "save", 2, 1).returncode == 0
    (tmp_path / "out" / "latest").write_text("three")
    part = tmp_path / "out" / "three" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    part.write_bytes(part.read_bytes()[:1000])
    loaded = run(tmp_path, "load", 1, 1)
    assert loaded.returncode != 0
    assert f"DeepSpeed checkpoint {part.parent}: got 2 parts of the optimizer" in loaded.stderr
    assert "ds_to_universal failed: exit code 1" in loaded.stderr
    assert not (tmp_path / "out" / CONVERTED / "three").exists()
