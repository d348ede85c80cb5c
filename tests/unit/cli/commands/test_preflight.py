"""`holdfast spec preflight`: lines, JSON, exit codes, and the options of --import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Holdfast

HANGS = """import torch.distributed as dist

if dist.get_rank() == 0:
    dist.barrier()
"""
JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
  entrypoint: {script: train.py, args: [--fsdp_version, "2", --fsdp_use_orig_params, "true"]}
  env:
    NCCL_TIMEOUT: "3600"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_finding_is_a_line_with_file_number_and_rule(place: Path, holdfast: Holdfast) -> None:
    (place / "train.py").write_text(HANGS)
    result = holdfast("spec preflight", "train.py")
    assert result.code == 1
    assert result.out.startswith("train.py:4: error HANG101 dist.barrier() under dist.get_rank()")
    assert result.out.count("\n") == 1
    assert "1 file read: 1 error, 0 warnings, 0 notes" in result.err


def test_a_job_is_checked_with_its_script(place: Path, holdfast: Holdfast) -> None:
    (place / "train.py").write_text("import helpers\n")
    (place / "helpers.py").write_text(HANGS)
    (place / "job.yaml").write_text(JOB)
    result = holdfast("spec preflight", "job.yaml", "--json")
    found = json.loads(result.out)
    assert result.code == 1 and (found["errors"], found["warnings"]) == (1, 2)
    assert [(f["file"], f["line"], f["rule"]) for f in found["findings"]] == [
        ("job.yaml", 6, "FSDP216"), ("job.yaml", 8, "ENV501"), ("helpers.py", 4, "HANG101"),
    ]  # fmt: skip


def test_warnings_alone_end_with_exit_code_0(place: Path, holdfast: Holdfast) -> None:
    (place / "train.py").write_text("import os\nos.environ['NCCL_TIMEOUT'] = '1'\n")
    result = holdfast("spec preflight", "train.py")
    assert result.code == 0 and "warning ENV501 NCCL_TIMEOUT: neither torch nor NCCL" in result.out


def test_the_old_launcher_of_torch_is_a_warning(place: Path, holdfast: Holdfast) -> None:
    (place / "plain.py").write_text("print(1)\n")
    text = JOB.partition("  entrypoint")[0]
    line = "python -m torch.distributed.launch plain.py"
    (place / "job.yaml").write_text(f"{text}  entrypoint: {{command: {line}}}\n")
    result = holdfast("spec preflight", "job.yaml")
    assert result.code == 0 and "job.yaml:6: warning ENV503" in result.out


def test_the_code_of_an_installed_module_is_not_read(place: Path, holdfast: Holdfast) -> None:
    text = JOB.partition("  entrypoint")[0]
    (place / "job.yaml").write_text(text + "  entrypoint: {module: json.tool}\n")
    result = holdfast("spec preflight", "job.yaml")
    assert result.code == 0 and "its code was not read" in result.err


def test_the_rules_are_listed_with_their_sources(holdfast: Holdfast) -> None:
    listed = holdfast("spec preflight", "--rules").out
    assert "FSDP203 (error): " in listed and "    source: " in listed
    rules = json.loads(holdfast("spec preflight", "--rules", "--json").out)
    assert {"id", "severity", "finds", "why", "fix", "source"} == set(rules[0])


def test_the_examples_have_no_error(holdfast: Holdfast) -> None:
    examples = Path(__file__).parents[4] / "examples"
    for job in sorted(examples.glob("*.yaml")):
        assert holdfast("spec preflight", job).code == 0, job


def test_an_import_prints_the_job_and_names_what_it_dropped(
    place: Path, holdfast: Holdfast
) -> None:
    config = {"train_batch_size": 16, "steps_per_print": 10, "zero_optimization": {"stage": 3}}
    (place / "ds.json").write_text(json.dumps(config))
    given = ("spec preflight", "--import", "ds.json", "--nodes", "2", "--workers", "2")
    result = holdfast(*given)
    assert result.code == 0 and "shard: world" in result.out
    assert "dropped steps_per_print (10): " in result.err
    saved = holdfast(*given, "--save", "job.yaml")
    assert saved.code == 0 and saved.out == "" and "job.yaml written" in saved.err
    assert (place / "job.yaml").read_text() == result.out
    assert holdfast("spec validate", "job.yaml").code == 0
    assert json.loads(holdfast(*given, "--json").out)["format"] == "DeepSpeed"


WRONG = {
    "nothing": ([], "preflight: got none of them; expected one of FILE, --rules, --import"),
    "two things": (["a.py", "--rules"], "preflight: got FILE and --rules; expected one of"),
    "no script": (["nope.py"], "nope.py: got a file that cannot be read (No such file"),
    "no job": (["nope.yaml"], "nope.yaml: cannot be read (No such file"),
    "no import": (["a.py", "--nodes", "2"], "--nodes: got 2 without --import; expected it with"),
    "no config": (["--import", "nope.json"], "--import: got nope.json (No such file or directory)"),
    "a text": (["--import", "text.yaml"], "--import: got text.yaml with str; expected an accel"),
    "broken JSON": (["--import", "broken.json"], "--import: got broken.json (Expecting"),
    "broken TOML": (["--import", "broken.toml"], "--import: got broken.toml ("),
    "broken YAML": (["--import", "broken.yaml"], "broken.yaml: line "),
    "a job": (["--import", "job.yaml"], "got job.yaml, a TrainingJob already; expected an"),
    "another format": (["--import", "other.json"], "--import: got other.json with hello; expected"),
    "a place that cannot be written": (
        ["--import", "ds.json", "--nodes", "1", "--workers", "2", "--save", "no/where.yaml"],
        "--save: got no/where.yaml (No such file or directory); expected a writable file",
    ),
    "no room for a script": (["job.yaml"], "spec.entrypoint.script: got train.py ("),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_of_the_user_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, place: Path, holdfast: Holdfast
) -> None:
    (place / "text.yaml").write_text("hello\n")
    (place / "broken.json").write_text("{")
    (place / "broken.toml").write_text("= 3")
    (place / "broken.yaml").write_text("a: [\n")
    (place / "other.json").write_text('{"hello": 1}')
    (place / "ds.json").write_text('{"train_batch_size": 16}')
    (place / "job.yaml").write_text(JOB)
    result = holdfast("spec preflight", *arguments)
    assert result.code == 2 and message in result.err
    assert "Traceback" not in result.err
