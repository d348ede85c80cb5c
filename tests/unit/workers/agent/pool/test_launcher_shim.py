"""A launcher that a rank starts runs its script as that rank, whichever way it is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.workers.agent.pool import last_output, launcher_shim

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], os.environ.get("MODE", ""), sys.orig_argv[1], *sys.argv[1:])
"""
ACCELERATE = {
    "__init__.py": "",
    "__main__.py": "import sys; print('accelerate itself', *sys.argv[1:])",
    "commands/__init__.py": "",
    "commands/launch.py": """
import os, types

def launch_command_parser():
    return types.SimpleNamespace(parse_args=lambda words: words)

def launch_command(words):
    import torch.distributed.run as torchrun
    if "bad" in words:
        raise ValueError("bad value")
    os.environ["MODE"] = " ".join(words[:2])
    torchrun.run(words)

def simple_launcher(*arguments): ...
tpu_launcher = tpu_pod_launcher = sagemaker_launcher = simple_launcher
""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A script, an accelerate that is not the real one, and its program in an environment."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, text in ACCELERATE.items():
        path = tmp_path / "packages" / "accelerate" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {"torchrun": "torch.distributed.run", "accelerate": "accelerate"}.items():
        (programs / name).write_text(
            f"#!{sys.executable}\nimport runpy\nrunpy.run_module('{module}', alter_sys=True, "
            "run_name='__main__')\n"
        )
        (programs / name).chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    own = {"PATH": f"{place}/bin:{os.defpath}", "PYTHONPATH": f"{place}/packages"}
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
             "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}  # fmt: skip
    return {**own, **launcher_shim.variables(own), **ranks, **more}


def shell(place: Path, text: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text], cwd=place, env=environment(place, **more),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("torchrun --nproc_per_node=8 --nnodes=2 train.py a --x", "rank 1  -u a --x"),
        ("nohup env A=1 torchrun -m train a", "rank 1  -u a"),
        ("torchrun --no-python echo $RANK a", "1 a"),
        ("PYTHONPATH= torchrun train.py", "rank 1  -u"),
        ("PATH=${PATH#*:} torchrun train.py", "rank 1  -u"),
        ("bin/torchrun train.py", "rank 1  -u"),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py a", "rank 1  -u a"),
        ("python -Xdev -um torch.distributed.run train.py", "rank 1  -u"),
        ("python -m torch.distributed.launch train.py a", "rank 1  -u --local-rank=1 a"),
        ("deepspeed --num_gpus=8 train.py a", "rank 1  -u --local_rank=1 a"),
        ("accelerate launch --mixed_precision bf16 train.py a",
         "rank 1 --mixed-precision bf16 -u a"),
        ("python -m accelerate.commands.launch --mixed_precision=no train.py",
         "rank 1 --mixed-precision no -u"),
        ("accelerate config a", "accelerate itself config a"),
        ("python train.py torchrun", "rank 1  train.py torchrun"),
        ("bash -c 'torchrun train.py a && torchrun train.py b'", "rank 1  -u a\nrank 1  -u b"),
    ],
)  # fmt: skip
def test_a_launcher_runs_its_script_once_as_this_rank(place: Path, line: str, printed: str) -> None:
    done = shell(place, line)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_rank_0_says_which_size_counts(place: Path) -> None:
    line = "torchrun --nnodes=1:4 --nproc_per_node=8 train.py"
    assert "the job decides" not in shell(place, line).stderr
    said = shell(place, line, RANK="0").stderr.splitlines()
    assert said == [
        "holdfast: torchrun with --nproc_per_node=8: the job decides, and has 2 workers on each "
        "node"
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("torchrun --new-option train.py",
         "command: got torchrun with the unknown option --new-option; expected options of it that "
         "Holdfast knows; remove it, or start the script itself: each rank has torchrun's "
         "variables"),
        ("accelerate launch --gpu_ids 0 train.py", "write spec.env.CUDA_VISIBLE_DEVICES instead"),
        ("accelerate launch --mixed_precision bad train.py", "holdfast: bad value"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_kept_is_a_usage_error(place: Path, line: str, why: str) -> None:
    done = shell(place, line)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    failed = last_output.usage(done.stderr)
    assert failed is not None and failed.message.startswith("holdfast: ") and why in failed.message


def test_without_a_rank_a_launcher_is_itself(place: Path) -> None:
    done = shell(place, "env -u RANK torchrun --help; env -u RANK deepspeed train.py")
    assert "usage: " in done.stdout and "--rdzv" in done.stdout
    assert (done.returncode, done.stderr) == (127, "holdfast: deepspeed: not found\n")


def test_the_sitecustomize_of_a_user_is_imported_too(place: Path) -> None:
    (place / "packages" / "sitecustomize.py").write_text("print('mine', __name__)")
    assert shell(place, "python train.py").stdout == "mine sitecustomize\nrank 1  train.py\n"


def test_the_shims_are_programs_and_named_once() -> None:
    shims = [path for path in Path(launcher_shim.SHIMS).iterdir() if not path.suffix]
    assert {path.name for path in shims} - {"__pycache__"} == {
        "torchrun", "accelerate", "accelerate-launch", "deepspeed"
    }  # fmt: skip
    assert all(os.access(path, os.X_OK) for path in shims)
    again = launcher_shim.variables(launcher_shim.variables({"PATH": "/bin"}))
    assert again["PATH"] == f"{launcher_shim.SHIMS}:/bin"
    assert re.fullmatch(r".*/shims", again["PYTHONPATH"])
