"""Program of a worker for the line of another launcher, and the lines that are rejected."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from holdfast.orchestrator.api.launchers import TORCHRUN, CommandRefused, Program
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping, parse_job
from holdfast.orchestrator.api.v1alpha1.command_line import read
from holdfast.orchestrator.api.v1alpha1.job import redacted_document
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.errors import SpecError
from tests.documents import job_document

STARTED: dict[str, dict[str, Any]] = {
    "torchrun --nproc_per_node 2 train.py a --lr 3": {"script": "train.py",
                                                      "args": ("a", "--lr", "3")},
    "torchrun --standalone -m pkg.train x": {"module": "pkg.train", "args": ("x",)},
    "python -m torch.distributed.run --nnodes=2 train.py": {"script": "train.py"},
    "torchrun --no-python ./train x": {"words": ("./train", "x")},
    "/venv/bin/torchrun train.py": {"script": "train.py", "python": "/venv/bin/python"},
    "accelerate launch --config_file f.yaml --mixed_precision=bf16 train.py --config_file mine": {
        "script": "train.py", "args": ("--config_file", "mine"),
        "launcher_args": ("--config-file", "f.yaml", "--mixed-precision", "bf16"),
    },
    "deepspeed --num_gpus=2 train.py --deepspeed ds.json": {
        "script": "train.py", "args": ("--deepspeed", "ds.json"),
        "local_rank_option": "--local_rank",
    },
    "deepspeed --no_local_rank train.py": {"script": "train.py", "local_rank_option": ""},
    "python -u train.py a": {"script": "train.py", "args": ("a",), "python": ""},
    "python -m pkg.train": {"module": "pkg.train"},
    "python3.12 train.py": {"script": "train.py", "python": "python3.12"},
    "python -O train.py": {"words": ("python", "-O", "train.py")},
    "A=1 env B='x y' torchrun train.py": {"script": "train.py", "env": {"A": "1", "B": "x y"}},
    "uv run --project p -p 3.12 train.py a": {
        "script": "train.py", "args": ("a",),
        "runner": ("uv", "run", "--project", "p", "-p", "3.12"),
    },
    "uv run torchrun --nproc-per-node=2 train.py": {"script": "train.py", "runner": ("uv", "run")},
    "uv run -m pkg.train": {"module": "pkg.train", "runner": ("uv", "run")},
    "uv run --with x train.py": {"words": ("uv", "run", "--with", "x", "train.py")},
    "conda run -n env python train.py": {
        "script": "train.py", "runner": ("conda", "run", "-n", "env"),
    },
    "uv run -m torch.distributed.run --nproc_per_node 2 train.py a": {
        "script": "train.py", "args": ("a",), "launcher": "torchrun", "runner": ("uv", "run"),
    },
    "uv run --module accelerate.commands.launch train.py": {
        "script": "train.py", "launcher": "accelerate launch", "runner": ("uv", "run"),
    },
    "pixi run -e x deepspeed train.py": {
        "script": "train.py", "launcher": "deepspeed", "runner": ("pixi", "run", "-e", "x"),
    },
    "python /venv/bin/torchrun --nproc_per_node=2 train.py": {
        "script": "train.py", "launcher": "torchrun", "python": "",
    },
    "/a/python /site/torch/distributed/launch.py train.py": {
        "script": "train.py", "launcher": "torch.distributed.launch", "python": "/a/python",
    },
    "/site/torch/distributed/run.py train.py": {"launcher": "torchrun", "python": ""},
    "python -mtorch.distributed.run train.py": {"script": "train.py", "launcher": "torchrun"},
    "python -m torchrun train.py": {"script": "train.py", "launcher": "torchrun"},
    "A=1 NPROC_PER_NODE=2 MASTER_PORT=29500 swift sft --add_version false --model m": {
        "module": "swift.cli.sft", "args": ("--add_version", "false", "--model", "m"),
        "launcher": "swift", "env": {"A": "1"}, "replaced": ("MASTER_PORT=29500",),
    },
    "/venv/bin/swift rlhf --add_version=False": {"module": "swift.cli.rlhf",
                                             "python": "/venv/bin/python"},
    "python -m swift.cli.main pt --add_version=false": {"module": "swift.cli.pt"},
    "python -m accelerate launch train.py": {"script": "train.py",
                                             "launcher": "accelerate launch"},
    "python -mpkg.train a": {"module": "pkg.train", "args": ("a",)},
    "conda run -n ds python train.py --strategy deepspeed": {
        "script": "train.py", "args": ("--strategy", "deepspeed"),
    },
    "uv run --with deepspeed train.py": {
        "words": ("uv", "run", "--with", "deepspeed", "train.py"),
    },
    "nohup python train.py --strategy deepspeed": {
        "words": ("nohup", "python", "train.py", "--strategy", "deepspeed"),
    },
    "bash run.sh deepspeed": {"words": ("bash", "run.sh", "deepspeed")},
    "nohup torchrun train.py": {"words": ("nohup", "torchrun", "train.py")},
    "bash -c 'cd src && deepspeed a.py'": {"words": ("bash", "-c", "cd src && deepspeed a.py")},
    "python -Xdev -um torch.distributed.run a.py": {
        "words": ("python", "-Xdev", "-um", "torch.distributed.run", "a.py"),
    },
    "python -um torch.distributed.run a.py": {"script": "a.py", "launcher": "torchrun"},
    "torchrun --no-python bash -c 'deepspeed a.py'": {"words": ("bash", "-c", "deepspeed a.py")},
    "bash -c 'pip install deepspeed && python train.py'": {
        "words": ("bash", "-c", "pip install deepspeed && python train.py"),
    },
    "bash run.sh '$HOME' \"*.txt\"": {"words": ("bash", "run.sh", "$HOME", "*.txt")},
    "torchrun \\\n  --nproc_per_node 2 \\\n  train.py\n": {"script": "train.py"},
}  # fmt: skip


@pytest.mark.parametrize("line", STARTED)
def test_a_worker_starts_what_the_launcher_would_start(line: str) -> None:
    program = read(line)
    assert {name: getattr(program, name) for name in STARTED[line]} == STARTED[line]
    if "words" not in STARTED[line]:
        assert not program.words


REFUSED = {
    "srun python train.py": ("srun", "write the line that it would start on one of them"),
    "mpirun -np 2 python train.py": ("mpirun", "Holdfast starts the ranks"),
    "docker run x": ("docker", "would not end with the worker"),
    "python -m horovod.runner -np 2 a.py": ("horovod.runner", "write the line that it would start"),
    "mpirun.openmpi -np 2 python a.py": ("mpirun.openmpi", "Holdfast starts the ranks"),
    "mpiexec.hydra -np 2 python a.py": ("mpiexec.hydra", "Holdfast starts the ranks"),
    "swift sft c.yaml": ("swift sft c.yaml", "write the values of the file as options"),
    "swift sft --model m": ("without --add_version false", "add `--add_version false`"),
    "swift deploy --model m": ("swift", "write the script or module that it starts"),
    "trl sft --config c.yaml": ("trl", "write `accelerate launch -m trl.scripts.sft ARGS`"),
    "uv run trl sft": ("trl", "write `accelerate launch -m trl.scripts.sft ARGS`"),
    "accelerate launch -m torch.distributed.run a.py": ("torchrun behind acc", "starts the ranks"),
    "deepspeed /venv/bin/torchrun a.py": ("torchrun behind deepspeed", "starts the ranks"),
    "python train.py | tee log": ("|, which is for a shell", "bash run.sh"),
    "python train.py > log 2>&1": (">, which is for a shell", "no shell reads the line"),
    "cd src && python train.py": ("&&, which is for a shell", "write spec.workingDirectory"),
    "cd src": ("cd", "write spec.workingDirectory"),
    "pip install x\npython train.py": ("several lines", "bash run.sh"),
    "python train.py --data $DATA": ("$DATA, which is for a shell", "quote it"),
    'python train.py "$(date)"': ("$(, which is for a shell", "no shell reads"),
    'bash run.sh "$DATA"': ("$DATA, which is for a shell", "no shell reads"),
    'bash -c "exec train" $DATA': ("$DATA, which is for a shell", "no shell reads"),
    "bash -c $DATA": ("$DATA, which is for a shell", "no shell reads"),
    "python train.py *.txt": ("*, which is for a shell", "quote it"),
    "python train.py ~/data": ("~, which is for a shell", "quote it"),
    "python train.py --data=~/data": ("~, which is for a shell", "quote it"),
    "python train.py 'abc": ("a line with no closing quotation", "quotes in pairs"),
    "torchrun": ("torchrun without a script", "the script that it starts"),
    "torchrun --nproc_per_node=2 --new-one train.py": ("--new-one", "start the script itself"),
    "torchrun --nproc_per_node=two train.py": ("--nproc_per_node=two", "a number"),
    "torchrun --virtual-local-rank train.py": ("--virtual-local-rank", "remove it"),
    "accelerate launch --gpu_ids 0,1 train.py": ("--gpu_ids=0,1", "spec.env.CUDA_VISIBLE_DEVICES"),
    "accelerate test": ("accelerate test", "accelerate launch"),
    "deepspeed --include h:0 train.py": ("--include=h:0", "Holdfast chooses the nodes"),
    "python": ("python without a script", "-m and a module"),
    "uv run python3.12 train.py": ("uv run before python3.12", "one of both"),
    "A=B": ("no program", "the program and its arguments"),
}


@pytest.mark.parametrize(
    "line",
    [
        'sh -c "exec python train.py --data $P"',
        '/bin/bash -euo pipefail -c "echo $(hostname) \\"${RANK}\\"; exec ./train `nproc` > $LOG"',
        'A=1 bash -lc "exec ./train $A"',
        "sh -c 'exec ./train $P'",
    ],
)
def test_a_shell_in_the_line_replaces_variables_in_its_own_text(line: str) -> None:
    program = read(line)
    assert program.words[-1] == shlex.split(line)[-1] and "$" in program.words[-1]


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_cannot_be_kept_is_refused_with_what_to_write(line: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        read(line)
    text = str(refused.value)
    assert text.startswith("command: got ") and "; expected " in text
    for part in REFUSED[line]:
        assert part in text


@pytest.mark.parametrize(
    "entrypoint",
    [
        {"module": "torch.distributed.run", "args": ["--nproc-per-node", "1", "train.py", "a"]},
        {"script": "/venv/bin/torchrun", "args": ["--standalone", "train.py", "a"]},
        {"module": "accelerate", "args": ["launch", "train.py", "a"]},
    ],
)
def test_a_launcher_as_script_or_module_is_read_as_its_line(entrypoint: dict[str, Any]) -> None:
    document = job("x")
    document["spec"]["entrypoint"] = entrypoint
    program = job_from_mapping(document).spec.entrypoint.program
    assert (program.script, program.args, program.python) == ("train.py", ("a",), "")
    document["spec"]["entrypoint"] = {"module": "deepspeed.launcher.launch"}
    with pytest.raises(SpecError, match=r"got deepspeed.launcher.launch; expected a program that"):
        job_from_mapping(document)


def test_the_options_of_torchrun_are_those_of_this_torch() -> None:
    ours = {name: option.has_value for option in TORCHRUN for name in option.names}
    theirs = {
        name: action.nargs != 0 and type(action).__name__ != "check_env"
        for action in get_args_parser()._actions
        if not isinstance(action, argparse._HelpAction)
        for name in action.option_strings
    }
    theirs.pop("--print-completion", None)
    theirs.pop("--print_completion", None)
    assert {name: ours.get(name) for name in theirs} == theirs


def job(command: str, **spec: Any) -> dict[str, Any]:
    return job_document("demo", {"entrypoint": {"command": command}, **spec})


SIZES = [
    pytest.param("torchrun --nproc_per_node=8 train.py", {"workersPerNode": 2},
                 "--nproc_per_node=8 with spec.workersPerNode 2", "write spec.workersPerNode: 8",
                 id="workers"),
    pytest.param("torchrun --nnodes=4 train.py", {"nodes": {"max": 2}},
                 "--nnodes=4 with spec.nodes {min: 1, max: 2}", "spec.nodes: {min: 1, max: 4}",
                 id="nodes"),
    pytest.param("torchrun --nnodes=2:4 train.py", {"nodes": {"min": 1, "max": 4}},
                 "--nnodes=2:4", "spec.nodes: {min: 2, max: 4}", id="a range of nodes"),
    pytest.param("accelerate launch --num_processes 4 train.py",
                 {"nodes": {"max": 2}, "workersPerNode": 1},
                 "--num_processes=4 with 2 workers", "write spec.workersPerNode: 2", id="world"),
    pytest.param("NPROC_PER_NODE=8 swift sft --add_version false", {"workersPerNode": 2},
                 "NPROC_PER_NODE=8 with spec.workersPerNode 2", "write spec.workersPerNode: 8",
                 id="variables of swift"),
    pytest.param("torchrun --max-restarts=3 train.py", {},
                 "--max-restarts=3 with spec.recovery.budgets.infrastructure.restarts",
                 "write spec.recovery.budgets.infrastructure.restarts: 3", id="restarts"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "spec", "got", "fix"), SIZES)
def test_other_sizes_than_those_of_the_spec_are_refused(
    line: str, spec: dict[str, Any], got: str, fix: str
) -> None:
    with pytest.raises(SpecError) as refused:
        job_from_mapping(job(line, **spec))
    (problem,) = refused.value.problems
    assert problem.field == "spec.entrypoint.command"
    assert got in problem.got and fix in problem.fix


def test_equal_sizes_are_accepted_and_what_is_replaced_is_said() -> None:
    line = "torchrun --nproc_per_node=2 --nnodes=1:2 --rdzv_endpoint=h:1 train.py"
    found = job_from_mapping(job(line, nodes={"min": 1, "max": 2}, workersPerNode=2))
    said = "\n".join(remarks(found))
    assert "torchrun is not started; each worker runs train.py" in said
    assert "--rdzv_endpoint=h:1: not used" in said


def test_one_worker_where_the_launcher_would_count_is_said() -> None:
    for line in ("torchrun --nproc_per_node=auto train.py", "deepspeed train.py"):
        counts = line.removesuffix(" train.py").removeprefix("torchrun ")
        said = "\n".join(remarks(job_from_mapping(job(line))))
        assert f"spec.workersPerNode: 1, where {counts} would start a worker on each GPU" in said
        assert "would start" not in "".join(remarks(job_from_mapping(job(line, workersPerNode=2))))
    for line in ("torchrun train.py", "deepspeed --num_gpus 1 train.py"):
        assert "would start" not in "".join(remarks(job_from_mapping(job(line))))


def test_variables_before_a_command_are_variables_of_the_job() -> None:
    found = job_from_mapping(job("HF_TOKEN=abc A=1 torchrun train.py", env={"B": "2"}))
    assert found.spec.env == {"HF_TOKEN": "abc", "A": "1", "B": "2"}
    assert job_from_mapping(job_to_mapping(found)) == found
    assert "abc" not in str(redacted_document(job_to_mapping(found)))
    for line in ("HF_TOKEN=abc", "HF_TOKEN='1 abc'", "'HF_TOKEN=1 abc'"):
        submitted = job_to_mapping(job_from_mapping(job(f"{line} torchrun train.py")))
        shown = redacted_document(submitted)["spec"]["entrypoint"]["command"]
        assert shown == "HF_TOKEN=(hidden) torchrun train.py"
    with pytest.raises(SpecError, match="got A with another value than"):
        job_from_mapping(job("A=1 torchrun train.py", env={"A": "2"}))
    with pytest.raises(SpecError, match="got a variable that Holdfast sets"):
        job_from_mapping(job("RANK=1 python train.py"))


def test_what_another_program_would_ignore_is_refused() -> None:
    text = str(job("bash run.sh", preload=["numpy"])).replace("'", '"')
    with pytest.raises(SpecError, match="got modules for bash"):
        parse_job(text)


def test_python_is_named_once() -> None:
    document = job("/venv/bin/python train.py")
    document["spec"]["entrypoint"]["python"] = "/other"
    with pytest.raises(SpecError, match="got /other beside /venv/bin/python in the command"):
        job_from_mapping(document)
    document = job("torchrun train.py")
    document["spec"]["entrypoint"]["python"] = "venv"
    assert job_from_mapping(document).spec.entrypoint.program == Program(
        script="train.py", launcher="torchrun", python="venv"
    )
