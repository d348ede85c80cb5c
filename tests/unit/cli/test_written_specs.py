"""Words of a command line come back from each writer of specs as they were typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import (
    job_from_mapping,
    job_to_mapping,
    load_job,
    parse_job,
    yaml_text,
)
from holdfast.orchestrator.api.v1alpha1.load import read_yaml
from holdfast.orchestrator.cli import script_job
from holdfast.orchestrator.cli.commands import plan
from holdfast.orchestrator.cli.script_job import ScriptRun
from holdfast.orchestrator.client import client
from holdfast.orchestrator.errors import SpecError

WORDS = (
    "--lr", "3e-4", "1e3", "0o17", "12:30", "08", "yes", "null", "~", "1_000", ".5", "0x1F",
    "2026-11-27", "y", "-1", "+2", "1.", "-.5e3", ".inf", "", "- a", "a: b", "#", "<<", "=", "é\n",
)  # fmt: skip


def run_of_words() -> ScriptRun:
    return ScriptRun(Path("train.py"), WORDS, env={f"V{n}": word for n, word in enumerate(WORDS)})


def saved(suffix: str) -> str:
    save = Path(f"job{suffix}")
    with script_job.spec_file(run_of_words(), save, str, lambda text: None):
        return save.read_text()


def displayed() -> str:
    shown: list[str] = []
    with script_job.spec_file(run_of_words(), None, str, shown.append) as (_file, show):
        show()
    return shown[0]


def of_the_client() -> str:
    with client._spec_beside(Path.cwd(), run_of_words().document("demo")) as file:
        return file.read_text()


WRITERS: dict[str, Callable[[], str]] = {
    "--save job.yaml": lambda: saved(".yaml"),
    "--save job.json": lambda: saved(".json"),
    "the display of run": displayed,
    "the client": of_the_client,
    "plan --save": lambda: plan._job_text(SimpleNamespace(spec=run_of_words().document("demo"))),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_words_and_variables_come_back_as_they_were_given(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = WRITERS[writer]()
    spec = parse_job(text).spec
    assert spec.entrypoint.args == WORDS
    assert tuple(spec.env.values()) == WORDS
    # PyYAML reads YAML 1.1.
    assert tuple(yaml.safe_load(text)["spec"]["entrypoint"]["args"]) == WORDS


def test_values_of_other_types_come_back() -> None:
    document = {"a": [1, 2.5, 1e-05, 1e20, True, None, "1f1b"], "b": {}, "c": []}
    assert read_yaml(yaml_text(document)) == document
    assert "- 1f1b\n" in yaml_text(document)


HEAD = "apiVersion: holdfast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: demo}\nspec:\n"


def test_numbers_in_args_and_env_are_taken_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        f"{HEAD}  nodes: &size {{max: 2}}\n"
        "  entrypoint: {script: t.py, args: [--lr, 2e-3, 0x1F, 1_000, 08, &n 7]}\n"
        "  workersPerNode: *n\n"
        "  env: {X: 1.50, Y: *n, <<: {Z: 3e-4}}\n"
    )
    spec = load_job(file).spec
    assert spec.entrypoint.args == ("--lr", "2e-3", "0x1F", "1_000", "08", "7")
    assert spec.env == {"X": "1.50", "Y": "7", "Z": "3e-4"}
    assert (spec.nodes.max, spec.workers_per_node) == (2, 7)


def document(args: list[Any], env: dict[str, Any]) -> dict[str, Any]:
    spec = {"entrypoint": {"script": "t.py", "args": args}, "env": env}
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob"}
    return {**head, "metadata": {"name": "demo"}, "spec": spec}


def test_numbers_of_python_become_their_texts() -> None:
    job = job_from_mapping(document(["--lr", 3e-4, 2], {"X": 1}))
    assert job.spec.entrypoint.args == ("--lr", "0.0003", "2")
    assert job.spec.env == {"X": "1"}
    assert json.loads(json.dumps(job_to_mapping(job)))["spec"]["env"] == {"X": "1"}


@pytest.mark.parametrize("value", [True, None, ["1"], {"a": 1}])
def test_what_is_neither_a_text_nor_a_number_is_rejected(value: Any) -> None:
    with pytest.raises(SpecError, match=r"spec.entrypoint.args.0: got .*; expected a valid string"):
        job_from_mapping(document([value], {}))
    with pytest.raises(SpecError, match=r"spec.env.X: got .*; expected a valid string"):
        job_from_mapping(document([], {"X": value}))


def test_a_spec_that_pyyaml_writes_is_read() -> None:
    text = yaml.safe_dump(document(["--learning_rate", "2e-3"], {"LR": "1e5"}))
    assert "- 2e-3\n" in text
    spec = parse_job(text).spec
    assert (spec.entrypoint.args[1], spec.env["LR"]) == ("2e-3", "1e5")
