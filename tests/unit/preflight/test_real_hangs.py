"""The hangs that were reproduced (D13), once more: each script runs as two gloo processes, rank 0
fails with the timeout of its group, and `preflight` names the line.

One process imports torch and forks all ranks of all scripts, which then run at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.orchestrator.preflight import check_script

HEAD = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
x = torch.ones(2, 4)
"""
FULLY = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
"""
READY = """
dist.barrier()  # both are here, however busy the machine is: now the timeout may be short
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
"""
TAIL = """
time.sleep(6 * rank)  # the rank that skipped the call stays alive for longer than the timeout
"""
CASES = {
    "skipped rank": (
        "HANG102",
        """
        for step in range(3):
            if rank == 1 and step == 1:
                break
            dist.all_reduce(x)  # here
        """,
    ),
    "rank-dependent branch": (
        "HANG101",
        """
        if rank == 0:
            dist.all_reduce(x)  # here
        """,
    ),
    "full_tensor on rank 0": (
        "HANG103",
        FULLY
        + """
        if rank == 0:
            print(model[0].weight.full_tensor())  # here
        """,
    ),
    "forward on rank 0": (
        "HANG104",
        FULLY
        + """
        if rank == 0:
            print(model(x))  # here
        """,
    ),
    "state_dict on rank 0": (
        "FSDP203",
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import StateDictType
        whole = FSDP(model, device_id=torch.device("cpu"))
        FSDP.set_state_dict_type(whole, StateDictType.FULL_STATE_DICT)
        if rank == 0:
            print(whole.state_dict())  # here
        """,
    ),
}


def write(directory: Path, name: str) -> tuple[Path, int]:
    """The script of a case, and the line that hangs."""
    script = directory / f"{name.replace(' ', '_')}.py"
    body = "".join(textwrap.dedent(part) for part in CASES[name][1].split(FULLY))
    shard = FULLY if FULLY in CASES[name][1] else ""
    script.write_text(HEAD + shard + READY + body + TAIL)
    lines = script.read_text().splitlines()
    return script, next(n for n, line in enumerate(lines, 1) if line.endswith("# here"))


LAUNCHER = """
import os, runpy, sys, traceback
import torch.distributed.fsdp
children = []
for script in sys.argv[1:]:
    for rank in (0, 1):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ["RANK"], sys.argv, status = str(rank), [script, script + ".store"], 0
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            status = 1
            with open(f"{script}.{rank}.error", "w") as file:
                traceback.print_exc(file=file)
        os._exit(status)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traceback of rank 0 of each case; empty if it ended without one."""
    directory = tmp_path_factory.mktemp("hangs")
    scripts = {name: write(directory, name)[0] for name in CASES}
    command = [sys.executable, "-c", LAUNCHER, *map(str, scripts.values())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    errors = {name: Path(f"{script}.0.error") for name, script in scripts.items()}
    return {name: error.read_text() if error.exists() else "" for name, error in errors.items()}


@pytest.mark.e2e
@pytest.mark.parametrize("name", CASES)
def test_the_script_hangs_until_the_timeout_and_its_line_was_named(
    name: str, failures: dict[str, str], tmp_path: Path
) -> None:
    script, line = write(tmp_path, name)
    found, _project = check_script(script, [tmp_path])
    errors = [(f.rule, f.line) for f in found if f.severity == "error"]
    assert errors == [(CASES[name][0], line)]
    failure = failures[name]
    assert f"line {line}," in failure, failure or "rank 0 ended without an error"
    assert "imed out" in failure or "imeout" in failure, failure
