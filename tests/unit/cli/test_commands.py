"""The commands without a running job: help, usage errors, JSON output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.orchestrator import parts
from holdfast.orchestrator.cli.commands import chaos
from holdfast.orchestrator.cli.targets import local
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.observe.view import JobView

from .conftest import Holdfast

VERBS = [
    "run", "submit", "attach", "again", "status", "logs", "ui", "resize", "suspend", "resume",
    "cancel", "delete",
]  # fmt: skip
HEAVY = ("asyncio", "pydantic", "msgspec", "yaml", "fsspec", "torch", "numpy", "psutil")

JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
  entrypoint: {recipe: {name: pretrain}}
  nodes: {max: 2}
  workersPerNode: 2
"""


def test_help_names_every_verb(holdfast: Holdfast) -> None:
    result = holdfast("--help")
    assert result.code == 0
    if parts.part("command ui") is None:
        pytest.skip("a part is not installed: ui")
    names = re.findall(r"^│ ([a-z]+) ", result.out, re.MULTILINE)
    assert names == [*VERBS, "checkpoint", "spec", "debug"] and len(names) <= 15


@pytest.mark.parametrize("verb", [*VERBS, "spec plan", "debug events", "operator"])
def test_every_verb_has_help_whose_options_are_whole_at_80_columns(
    verb: str, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = holdfast(verb, "--help")
    assert result.code == 0 and f"holdfast {verb}" in result.out and "…" not in result.out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, holdfast.orchestrator.cli.main\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules and m != 'pydantic'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["resize", "demo"], "Missing argument 'N'"),
        (["resize", "demo", "two"], "Invalid value for 'N'"),
        (["status", "--nope"], "No such option: --nope"),
        (["status", "--watch"], "--watch needs a JOB"),
        (["run"], "FILE: got nothing"),
        (["run", "--attach", "demo"], "No such option: --attach. Arguments of a script come after"),
        (["run", "--again", "demo"], "Write `holdfast again`."),
        (["plan", "x.yaml"], "No such command 'plan'. Write `holdfast spec plan`."),
        (["stacks", "x"], "No such command 'stacks'. Write `holdfast debug stacks`."),
        (["statu"], "No such command 'statu'. Did you mean 'status'? See"),
        (["list"], "Write `holdfast status`."),
        (["status", "nope"], "job: got nope; expected a job"),
        (["status", "../x"], "job: got ../x; expected a job"),
        (["attach", "nope"], "job: got nope; expected a job"),
        (["debug", "kill-worker", "nope"], "job: got nope"),
        (["checkpoint", "list", "nope"], "job: got nope"),
        (["checkpoint", "list", "./nope"], "JOB_OR_PATH: got ./nope; expected a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_one_paragraph_and_exits_with_2(
    arguments: list[str], message: str, holdfast: Holdfast
) -> None:
    result = holdfast(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.startswith("error: ")
    assert len(result.err.strip().splitlines()) == 1


def test_a_fault_waits_until_the_job_trains(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["pending", "starting", "running", "killed"])

    job = SimpleNamespace(
        view=lambda: JobView(name="demo", state=next(states)),
        request=lambda verb, **arguments: Reply(ok=True, detail=next(states)),
    )
    monkeypatch.setattr(local.LocalTarget, "find", lambda target, name: job)
    monkeypatch.setattr(chaos, "POLL_S", 0)
    text = "job demo: is pending; kill-worker waits until it trains\n"
    assert holdfast("debug kill-worker", "demo") == (0, "job demo: killed\n", text)


def test_no_arguments_show_the_help_and_exit_with_2(holdfast: Holdfast) -> None:
    result = holdfast()
    assert result.code == 2
    assert "Usage: holdfast" in result.out


def test_no_jobs_yet(holdfast: Holdfast) -> None:
    assert "no jobs in" in holdfast("status").err
    assert holdfast("status", "--json").out == "[]\n"


def test_the_plan_is_the_same_in_text_and_json(
    write: Callable[[str], Path], holdfast: Holdfast
) -> None:
    path = write(JOB)
    text = holdfast("spec plan", path, "--explain", "--environment")
    assert text.code == 0
    for part in ("HSDP on 2 nodes", "8 P / S", "MASTER_ADDR", "all-reduce of gradients", "why: "):
        assert part in text.out
    plan = json.loads(holdfast("spec plan", "--json", path).out)
    assert plan["mesh"]["replicate"] == 2
    assert plan["strategy"] == "HSDP"
    assert plan["why"] in text.out
    assert {setting["source"] for setting in plan["environment"]} >= {"contract", "fabric"}


def test_a_plan_for_fewer_nodes_and_a_known_device(
    write: Callable[[str], Path], holdfast: Holdfast
) -> None:
    result = holdfast("spec plan", write(JOB), "--nodes", "1", "--device-memory", "8Gi")
    assert "DDP on 1 node" in result.out
    assert "of 8.0 GiB" in result.out
    result = holdfast("spec plan", write(JOB), "--nodes", "1", "--device-memory", "64Mi")
    assert "FSDP on 1 node" in result.out
    path = write(JOB.replace("{max: 2}", "{min: 2, max: 2}"))
    result = holdfast("spec plan", path, "--nodes", "1")
    assert result.code == 2
    assert "--nodes: got 1; expected 2 to 2 nodes" in result.err


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory"])
def test_a_memory_without_meaning(
    option: str, write: Callable[[str], Path], holdfast: Holdfast
) -> None:
    result = holdfast("spec plan", write(JOB), option, "lots")
    assert result.code == 2
    assert f"{option}: got lots; expected a quantity such as 2, 500m or 4Gi" in result.err


def test_the_schema_is_valid_json_and_closed(holdfast: Holdfast, tmp_path: Path) -> None:
    schema = json.loads(holdfast("spec schema").out)
    assert schema["properties"]["kind"]["const"] == "TrainingJob"
    assert schema["additionalProperties"] is False
    path = tmp_path / "schema.json"
    assert holdfast("spec schema", "-o", path).code == 0
    assert json.loads(path.read_text()) == schema


def test_the_crd_is_printed_instead(holdfast: Holdfast) -> None:
    text = holdfast("spec schema", "--crd").out
    assert "kind: CustomResourceDefinition" in text and "trainingjobs.holdfast.dev" in text


def test_version_names_torch(holdfast: Holdfast) -> None:
    assert "torch " in holdfast("--version").out
