"""Invalid options and arguments: the message and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Holdfast
from .test_bad_input import SCRIPT

Write = Callable[[str], Path]
DEEP = 3000 * "["


def test_a_plan_for_more_nodes_than_the_maximum_is_that_of_a_resize(
    write: Write, holdfast: Holdfast
) -> None:
    file = write(SCRIPT + "  nodes: {max: 2}\n")
    result = holdfast("spec plan", file, "--nodes", "4", "--json")
    assert result.code == 0
    made = json.loads(result.out)
    assert made["num_nodes"] == 4 and len(made["nodes"]) == 4
    assert [size["nodes"] for size in made["sizes"]] == [1, 2, 3, 4]


def test_a_plan_for_nodes_that_replica_groups_do_not_fill_names_valid_numbers(
    write: Write, holdfast: Holdfast
) -> None:
    file = write(SCRIPT + "  nodes: {min: 2, max: 2}\n  parallelism: {shard: 2}\n")
    result = holdfast("spec plan", file, "--nodes", "5")
    assert result.code == 2
    assert "--nodes: got 5; expected whole replica groups at 1 workers per node" in result.err
    assert "use 4 or 6" in result.err
    result = holdfast("spec plan", file, "--nodes", "100001")
    assert result.code == 2 and "--nodes" in result.err


def test_a_directory_named_like_a_job_gets_a_hint_to_write_it_as_a_path(
    tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adir").mkdir()
    monkeypatch.chdir(tmp_path)
    for verb, *more in (("list",), ("verify",), ("export", "out")):
        result = holdfast("checkpoint", verb, "adir", *more)
        assert result.code == 2
        assert "job: got adir; expected a job" in result.err
        assert "to name the directory, write ./adir" in result.err
    assert "./" not in holdfast("checkpoint", "list", "bdir").err


def test_a_path_that_is_too_long_is_not_a_directory(holdfast: Holdfast) -> None:
    result = holdfast("checkpoint", "list", "./" + 5000 * "a")
    assert result.code == 2
    assert "JOB_OR_PATH: got ./aaa" in result.err and "a directory, a URL or a job" in result.err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--agent-endpoint", "nonsense", "HOST:PORT"),
        ("--agent-endpoint", "host:99999", "HOST:PORT"),
        ("--listen", "²", "a port, or an address and a port"),
        ("--user-credentials", DEEP, "JSON such as"),
        ("--worker-requests", DEEP, "JSON such as"),
        ("--cache-volume", DEEP, "JSON such as"),
    ],
)
def test_options_of_an_operator_are_checked_before_a_cluster_is_contacted(
    option: str, value: str, expected: str, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    options = {"--agent-endpoint": "host:7077", option: value}
    result = holdfast("operator", *(word for pair in options.items() for word in pair))
    assert result.code == 2
    assert f"{option}: got {value}" in result.err and f"; expected {expected}" in result.err


def test_compiled_code_and_checkpoints_do_not_share_a_volume(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs of a namespace write to the one, and no job may reach the other's."""
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    volume = json.dumps({"persistentVolumeClaim": {"claimName": "shared"}})
    result = holdfast(
        "operator", "--agent-endpoint", "host:7077", "--checkpoint-root", "/checkpoints",
        "--checkpoint-volume", volume, "--cache-volume", volume,
    )  # fmt: skip
    assert result.code == 2
    assert f"--cache-volume: got {volume}; expected another volume than" in result.err
