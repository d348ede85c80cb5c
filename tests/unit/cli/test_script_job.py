"""`holdfast run train.py --nodes 2 -- ARGS`: the spec that it makes, and what it rejects."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.cli import script_job
from holdfast.orchestrator.cli.launch_sizes import not_taken_along
from holdfast.orchestrator.cli.options import complete
from holdfast.orchestrator.cli.script_job import ScriptRun
from holdfast.orchestrator.cli.targets.local import LocalTarget
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.runtime.job_directory import Home

from .conftest import Holdfast

FILES = {
    "train.py": "print('hello')\n",
    "broken.py": "def f(:\n",
    "nul.py": "x = 1\0\n",
    "train.ipynb": '{"cells": []}',
    "run.sh": "#!/bin/bash\ntorchrun --nproc_per_node=2 \\\n  train.py\n",
    "train": "#!/usr/bin/env perl\nprint 1;\n",
    "plain.yaml": "num_processes: 8\nnum_machines: 1\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(line: str, **options: Any) -> dict[str, Any]:
    file, *words = shlex.split(line)
    found = script_job.asked(Path(file), words, **options)
    assert found is not None
    made: dict[str, Any] = found.document("demo")["spec"]
    return made


def test_the_options_become_fields_of_a_spec() -> None:
    assert spec_of("train.py --lr 3", nodes=2, workers=4, gpus=0, env=["A=b=c"], python="venv") == {
        "entrypoint": {"script": "train.py", "args": ["--lr", "3"], "python": "venv"},
        "nodes": {"min": 1, "max": 2},
        "workersPerNode": 4,
        "resources": {"gpu": 0},
        "env": {"A": "b=c"},
    }
    assert spec_of("train.py") == {"entrypoint": {"script": "train.py"}}


def test_arguments_to_resume_are_one_text_of_the_command_line() -> None:
    run = script_job.asked(Path("train.py"), ["-v"], resume_args="--resume '{checkpoint}'")
    assert run is not None and run.resume_args == ("--resume", "{checkpoint}")
    entry = run.document("a")["spec"]["entrypoint"]
    assert entry["resumeArgs"] == ["--resume", "{checkpoint}"] and entry["args"] == ["-v"]
    assert "--resume-args=--resume '{checkpoint}'" in run.options("a")
    with pytest.raises(UserError, match=r"--resume-args: got it's.*words as in a shell"):
        script_job.asked(Path("train.py"), [], resume_args="it's")


def test_a_launchers_line_gives_the_sizes() -> None:
    line = "torchrun --nnodes=2:4 --nproc_per_node=8 --max-restarts=3 train.py 'a b'"
    assert spec_of(line) == {
        "entrypoint": {"command": line},
        "nodes": {"min": 2, "max": 4},
        "workersPerNode": 8,
        "recovery": {"budgets": {"infrastructure": {"restarts": 3}}},
    }
    line = "accelerate launch --num_processes 8 train.py"
    assert spec_of(line, nodes=2)["workersPerNode"] == 4


COUNTED = {
    "deepspeed train.py": ("0,1,2,3", 4),
    "deepspeed --num_gpus -1 train.py": ("0,1,2,3", 4),
    "torchrun --nproc_per_node gpu train.py": ("0,1,2,3", 4),
    "torchrun --nproc_per_node auto train.py": ("0,1,2,3", 4),
    "accelerate launch train.py": ("0,1,2,3", 4),
    "accelerate launch --cpu train.py": ("0,1,2,3", None),
    "accelerate launch --config_file plain.yaml train.py": ("0,1,2,3", None),
    "torchrun train.py": ("0,1,2,3", None),
    "torchrun --nproc_per_node auto --standalone train.py": ("", os.cpu_count()),
    "torchrun --nproc_per_node cpu train.py": ("0,1,2,3", os.cpu_count()),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("line", COUNTED)
def test_gpus_of_this_machine_are_counted_where_the_launcher_would(line: str) -> None:
    visible, workers = COUNTED[line]
    env = {"CUDA_VISIBLE_DEVICES": visible}
    run = ScriptRun(Path(line.split()[0]), tuple(line.split()[1:]), env=env, is_local=True)
    assert run.document("demo")["spec"].get("workersPerNode") == workers
    assert replace(run, workers=3).document("demo")["spec"]["workersPerNode"] == 3


def test_nodes_of_one_machine_and_workers_with_several_gpus_share_them() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    run = ScriptRun(Path("deepspeed"), ("train.py",), nodes=2, env=env, is_local=True)
    assert run.document("demo")["spec"]["workersPerNode"] == 4
    assert replace(run, gpus=2).document("demo")["spec"]["workersPerNode"] == 2
    assert "workersPerNode" not in replace(run, gpus=0).document("demo")["spec"]


def test_what_cannot_be_counted_is_refused_with_the_option_to_write() -> None:
    for line in ("deepspeed train.py", "torchrun --nproc_per_node=gpu train.py",
                 "accelerate launch train.py"):  # fmt: skip
        run = ScriptRun(Path(line.split()[0]), tuple(line.split()[1:]))
        with pytest.raises(UserError, match=r"would count the GPUs .*; write --workers N"):
            run.document("demo")
        assert replace(run, workers=8).document("demo")["spec"]["workersPerNode"] == 8
    env = {"CUDA_VISIBLE_DEVICES": ""}
    words = ("--nproc_per_node=gpu", "train.py")
    with pytest.raises(UserError, match=r"--nproc_per_node=gpu, and .* no GPU; .*--workers N"):
        ScriptRun(Path("torchrun"), words, env=env, is_local=True).document("demo")


def test_the_default_configuration_of_accelerate_is_checked_as_a_named_one(
    here: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(here))
    file = here / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text("num_processes: 4\nmixed_precision: bf16\n")
    line = ["--", "accelerate", "launch", "train.py"]
    result = holdfast("run", *line)
    assert result.code == 2 and f"got num_processes: 4 in {file} with" in result.err, result
    for other in ("--workers=4", "--env=HF_HOME=/nowhere"):  # a later check rejects the GPUs
        result = holdfast("run", "--gpus=64", other, *line)
        assert result.code == 2 and "num_processes: 4" not in result.err, result
    file.write_text("num_processes: [")
    assert f"got accelerate's file {file} (" in holdfast("run", *line).err


def test_for_a_cluster_it_is_said_that_the_default_configuration_stays_here(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(here))
    (here / "accelerate").mkdir()
    (here / "accelerate" / "default_config.yaml").write_text("num_processes: 4\n")

    def remarks_on(line: str) -> list[str]:
        run = ScriptRun(Path(line.split()[0]), tuple(line.split()[1:]), workers=4)
        return list(not_taken_along(job_from_mapping(run.document("demo"))))

    (found,) = remarks_on("accelerate launch train.py")
    assert "is not taken along: the nodes read their own" in found
    assert remarks_on("accelerate launch --config_file plain.yaml train.py") == []
    assert remarks_on("torchrun train.py") == []


def test_the_name_comes_from_the_script() -> None:
    titles = {"src/Train_GPT-2.py": "train-gpt-2", "-.py": "job", "x" * 60 + ".py": "x" * 40}
    for file, title in titles.items():
        assert ScriptRun(Path(file)).title() == title
    assert ScriptRun(Path("torchrun"), ("-m", "pkg.fine_tune")).title() == "fine-tune"
    assert ScriptRun(Path("train.py"), name="mine").title() == "mine"


def test_a_name_that_is_used_gets_a_number(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path)
    assert target.free_name("train") == "train"
    for name in ("train", "train-2"):
        directory = Home(tmp_path).directory(name).path
        directory.mkdir(parents=True)
        (directory / "job.json").write_text("{}")
    assert target.free_name("train") == "train-3"


def test_a_saved_spec_is_found_from_its_own_directory(here: Path) -> None:
    (here / "jobs").mkdir()
    run, shown = ScriptRun(Path("train.py"), ("a",)), list[str]()
    save = Path("jobs/job.yaml")
    with script_job.spec_file(run, save, str, shown.append) as (file, _):
        assert file == save
    assert yaml.safe_load(save.read_text())["spec"] == {
        "entrypoint": {"script": "train.py", "args": ["a"]},
        "workingDirectory": "..",
    }
    assert "holdfast run jobs/job.yaml" in shown[0]
    with (
        pytest.raises(UserError, match="which exists; expected a new file"),
        script_job.spec_file(run, save, lambda name: name, shown.append),
    ):
        raise AssertionError


def test_a_spec_that_is_not_saved_is_shown_and_removed(here: Path) -> None:
    run, shown = ScriptRun(Path("train.py")), list[str]()
    with script_job.spec_file(run, None, lambda name: name, shown.append) as (file, show):
        show()
        assert yaml.safe_load(file.read_text())["spec"] == {"entrypoint": {"script": "train.py"}}
    assert not file.exists()
    assert yaml.safe_load(shown[0])["spec"] == {"entrypoint": {"script": "train.py"}}


def test_values_of_secrets_are_not_shown(here: Path) -> None:
    env = {"HF_TOKEN": "abc", "TOKENIZERS_PARALLELISM": "false", "PIP_INDEX_URL": "https://a:b@h/s"}
    run, shown = ScriptRun(Path("WANDB_API_KEY=def"), ("python", "train.py"), env=env), list[str]()
    with script_job.spec_file(run, None, lambda name: name, shown.append) as (file, show):
        show()
        assert yaml.safe_load(file.read_text())["spec"]["env"] == env
    assert yaml.safe_load(shown[0])["spec"] == {
        "entrypoint": {"command": "WANDB_API_KEY=(hidden) python train.py"},
        "env": {
            "HF_TOKEN": "(hidden)",
            "TOKENIZERS_PARALLELISM": "false",
            "PIP_INDEX_URL": "https://(hidden)@h/s",
        },
    }


def test_a_saved_spec_with_secrets_is_for_its_owner_only_and_not_for_a_cluster(here: Path) -> None:
    run, shown = ScriptRun(Path("train.py"), env={"HF_TOKEN": "abc", "A": "1"}), list[str]()
    with script_job.spec_file(run, Path("job.json"), str, shown.append) as (file, _):
        assert json.loads(file.read_text())["spec"]["env"] == {"HF_TOKEN": "abc", "A": "1"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert "job.json has the value of HF_TOKEN: only you" in shown[1]
    with (
        pytest.raises(UserError, match=r"HF_TOKEN, whose value .* a\.yaml; .* a Secret"),
        script_job.spec_file(run, Path("a.yaml"), str, shown.append, uploads=True),
    ):
        raise AssertionError
    assert not Path("a.yaml").exists()


def test_for_a_cluster_a_spec_is_saved_in_the_uploaded_directory_only(here: Path) -> None:
    (here / "jobs").mkdir()
    run = ScriptRun(Path("train.py"))
    with (
        pytest.raises(UserError, match=r"got jobs/a\.yaml for a cluster; .*; --save a\.yaml"),
        script_job.spec_file(run, Path("jobs/a.yaml"), str, print, uploads=True),
    ):
        raise AssertionError
    assert not Path("jobs/a.yaml").exists()
    with script_job.spec_file(run, here / "a.yaml", str, print, uploads=True) as (file, _):
        assert file.exists()


@pytest.mark.usefixtures("here")
def test_the_spec_of_a_refused_job_is_not_saved(holdfast: Holdfast) -> None:
    for _attempt in range(2):
        result = holdfast("run", "missing.py", "--save", "a.yaml")
        assert result.code == 2 and "got missing.py (" in result.err, result
        assert "written" not in result.out and "a.yaml" not in result.err
    assert not Path("a.yaml").exists()
    result = holdfast("run", "train.py", "--save", "train2.py")
    assert result.code == 2 and "--save: got train2.py; expected" in result.err
    assert not Path("train2.py").exists()


def test_a_script_of_the_current_directory_is_named_relative_to_it(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "linked").symlink_to(here)
    for given in (here / "train.py", here / "linked" / "train.py"):
        assert spec_of(str(given)) == {"entrypoint": {"script": "train.py"}}
    outside = Path("/opt/train.py")
    assert spec_of(str(outside)) == {"entrypoint": {"script": str(outside)}}


def test_words_after_two_dashes_belong_to_the_script() -> None:
    words = ["run", "train.py", "--ray", "--", "--ray", "-x"]
    assert complete(words) == ["run", "train.py", "--ray=", "--", "--ray", "-x"]


def test_the_options_make_the_same_run_again() -> None:
    run = ScriptRun(Path("train.py"), ("x",), nodes=2, gpus=0, env={"A": "b c"})
    assert run.options("demo") == ["--nodes=2", "--gpus=0", "--name=demo", "--env=A=b c"]


REFUSED = [
    pytest.param("broken.py", "spec.entrypoint.script: got broken.py (line 1: ", "compiles",
                 id="a syntax error"),
    pytest.param("nul.py", "got nul.py (a binary file)", "entrypoint.command: ./nul.py",
                 id="a binary"),
    pytest.param("train.ipynb", "got train.ipynb (a notebook)",
                 "`jupyter nbconvert --to script train.ipynb`", id="a notebook"),
    pytest.param("run.sh", "got run.sh (a shell script)", "entrypoint.command: bash run.sh",
                 id="a shell script"),
    pytest.param("missing.py", "got missing.py (", "a Python file", id="no file"),
    pytest.param("-- bash missing.sh", "got missing.sh (", "does not exist",
                 id="no shell script"),
    pytest.param("-- ./train x", "got ./train (not executable)", "chmod +x ./train",
                 id="no permission to execute"),
    pytest.param("-- srun python train.py", "got srun;", "Holdfast starts the ranks", id="srun"),
    pytest.param("-- torchrun missing.py", "spec.entrypoint.command: got missing.py (",
                 "a Python file", id="a launcher of no file"),
    pytest.param("-- accelerate launch --config_file plain.yaml train.py",
                 "got num_processes: 8 in plain.yaml", "num_processes: 1 in the file",
                 id="sizes in accelerate's file"),
    pytest.param("train.py --python missing", "spec.entrypoint.python: got missing (",
                 "with bin/python", id="no interpreter"),
    pytest.param("train.py --python train.ipynb", "spec.entrypoint.python: got train.ipynb",
                 "is not executable", id="an interpreter that is none"),
    pytest.param("train.py --env A", "--env: got A; expected NAME=VALUE", "", id="no value"),
    pytest.param("train.py --lr 3", "No such option: --lr", "come after --.", id="no dashes"),
    pytest.param("train.py --name A_b", "metadata.name: got 'A_b'", "lower-case", id="a name"),
    pytest.param("plain.yaml --nodes 2", "--nodes: got it with plain.yaml", "with a script",
                 id="options beside a spec"),
    pytest.param("plain.yaml -- a", "ARGS: got a with plain.yaml", "spec.entrypoint.args",
                 id="arguments beside a spec"),
    pytest.param(".", "FILE: got ., a directory", "a script", id="a directory"),
    pytest.param("--nodes 2", "--nodes: got it without a script", "", id="no script"),
]  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("line", "got", "fix"), REFUSED)
def test_what_cannot_run_is_refused_before_the_start(
    holdfast: Holdfast, line: str, got: str, fix: str
) -> None:
    result = holdfast("run", *line.split())
    assert result.code == 2, result
    assert got in result.err and fix in result.err
    assert "Traceback" not in result.err


def test_an_interpreter_compiles_the_script_itself(
    here: Path, holdfast: Holdfast, write: Callable[[str], Path]
) -> None:
    spec = write(
        "apiVersion: holdfast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: demo}\n"
        f"spec: {{entrypoint: {{script: broken.py, python: {sys.executable}}}}}\n"
    )
    result = holdfast("spec validate", spec)
    assert result.code == 2 and "got broken.py (line 1: " in result.err
    assert f"Python {sys.version_info.major}.{sys.version_info.minor} compiles" in result.err
    spec.write_text(spec.read_text().replace("broken.py", "train.py"))
    assert holdfast("spec validate", spec).code == 0
