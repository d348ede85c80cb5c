"""Documents that YAML reads, or almost reads: each is refused at once, with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, parse_job
from holdfast.orchestrator.api.v1alpha1.load import document_problems, read_yaml
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.errors import SpecError

from .conftest import Holdfast
from .test_bad_input import RECIPE, SCRIPT, SPEC

Write = Callable[[str], Path]
TOO_LONG = 5000 * "a"
NOWHERE = "http://127.0.0.1:1"
"""An address that is asked only after the checks of the files."""

LINES = [  # the last line of the spec, and a part of the message
    ("env: {MY_TOKEN: [12]}", "spec.env.MY_TOKEN: got (hidden); expected a valid string"),
    ("suspend: !!bool perhaps", "line 7, column 12: got a value that is not a valid bool"),
    ("image: !!timestamp x", "line 7, column 10: got a value that is not a valid timestamp"),
    ("image: !!timestamp 2024-01-02", "the document: got Object of type date is not JSON"),
    ("priority: !!int ''", "line 7, column 13: got a value that is not a valid int"),
    (f"nodes: {{max: {5000 * '9'}}}", "line 7, column 16: got a value that is not a valid int"),
    (
        f"nodes: {{max: {30 * '9'}}}",
        "spec.nodes.max: got 999999999999999999999999999999; expected ",
    ),
    (f"env: {3000 * '['}{3000 * ']'}", "got too many lists and mappings inside each other"),
    (f"env: {3000 * '{'}{3000 * '}'}", "got too many lists and mappings inside each other"),
    ('"\\ud800": {a: !!int "\\ud800"}', "line 7, column 17: got a value that is not a valid int"),
    ('{"\\ud800": 1, "\\ud800": 2}: 3', "line 7: got the key \\ud800 twice; expected each key"),
    ("env: {A: &a [&b [*b]]}", "the document: got Circular reference detected"),
    ("kubernetes: {podTemplate: &a {spec: *a}}", "the document: got Circular reference detected"),
    ("env: {A: '1'}\n  env: {B: '2'}", "lines 7 and 8: got the key env twice; expected each key"),
    ("env: {A: '1', 'A': '2'}", "line 7: got the key A twice; expected each key once; remove"),
    ('env: {A: "x\\0y"}', "spec.env.A: got a text with the character U+0000 in it"),
    ('env: {A: "\\ud800"}', "spec.env.A: got a text with the character U+D800 in it"),
    ('env: {"A\\0": x}', "spec.env: got a text with the character U+0000 in it"),
    ('workingDirectory: "a\\0b"', "spec.workingDirectory: got a text with the character U+0000"),
    ("image: a\0b", "line 7, column 11: got the character U+0000; expected text without control"),
    ("nodes: {min: 1, max: true}", "spec.nodes.max: got True; expected a valid integer"),
    ('nodes: {min: 1, max: "2"}', "spec.nodes.max: got '2'; expected a valid integer"),
    ("nodes: {min: 1, max: 2.5}", "spec.nodes.max: got 2.5; expected a valid integer"),
    ('suspend: "yes"', "spec.suspend: got 'yes'; expected a valid boolean"),
    ("suspend: 1", "spec.suspend: got 1; expected a valid boolean"),
    ("env: {A: *b}", "line 7: got found undefined alias 'b'"),
    ("suspend: true\n---\nspec: {}", "line 8: got a second document; expected one in a file"),
    ("nodes: null", "spec.nodes: got nothing; expected a mapping; give it a value, or remove"),
    ("recovery: {budgets: {user: 3}}", "spec.recovery.budgets.user: got 3; expected a mapping"),
    ("env: {A: }", 'spec.env.A: got nothing; expected a valid string; give it a value ("" is an'),
    ("fabric: {hcas: mlx5_0}", "spec.fabric.hcas: got 'mlx5_0'; expected a list"),
    ("checkpoint: {path: ''}", "spec.checkpoint.path: got ''; expected a text that is not empty"),
    ("checkpoint: {path: 's3://'}", "spec.checkpoint.path: got s3://; expected a bucket or a dir"),
    ("resources: {memory: .inf}", "spec.resources.memory: got inf; expected a quantity of at most"),
    (f"resources: {{cpu: 1{400 * '0'}}}", "; expected a quantity of at most 1e+18, such as 4Gi"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line[:40] for line, _ in LINES])
@pytest.mark.parametrize("verb", ["spec validate", "spec plan", "run"])
def test_a_document_that_cannot_be_read_or_used_is_refused_with_its_place(
    verb: str, line: str, message: str, write: Write, holdfast: Holdfast
) -> None:
    result = holdfast(verb, write(f"{SCRIPT}  {line}\n"))
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (write(SCRIPT).parent / "home").exists()


def test_a_document_that_cannot_be_read_is_reported_as_json_too(
    write: Write, holdfast: Holdfast
) -> None:
    result = holdfast("spec validate", "--json", write(SCRIPT + "  env: {A: 1, A: 2}\n"))
    assert result.code == 2
    assert json.loads(result.out)["problems"][0]["field"] == "line 7"


def test_aliases_that_expand_to_a_huge_document_are_refused(
    write: Write, holdfast: Holdfast
) -> None:
    bomb = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for n in range(1, 20):
        bomb += f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]\n"
    result = holdfast("spec validate", write(bomb))
    assert result.code == 2
    assert (
        f"the document: got more than {limits.MAX_DOCUMENT_BYTES} characters, aliases counted"
        in result.err
    )


def test_aliases_and_merges_are_read() -> None:
    document = read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n")
    assert document["b"] == {"x": 3, "y": 2}
    assert document["c"] == [{"x": 1, "y": 2}] * 2
    nested = read_yaml("a: {b: &b {<<: {x: 1}, x: 2}}\nc: {<<: *b}\n")
    assert nested == {"a": {"b": {"x": 2}}, "c": {"x": 2}}
    several = read_yaml("a: &a {one: 1}\nb: &b {one: 2, two: 2}\nc: {<<: [*a, *b], three: 3}\n")
    assert several["c"] == {"one": 1, "two": 2, "three": 3}
    assert document_problems(document) == []


def test_numbers_and_dates_are_read_as_kubectl_reads_them() -> None:
    """Expected values are the output of `helm template` for the same texts (Helm 3.22)."""
    numbers = {
        "1e-4": 0.0001, "1e+06": 1e6, "1E5": 1e5, "1.0e-4": 0.0001, ".5": 0.5, "1.": 1.0,
        "1.e3": 1e3, "1_000": 1000, "0x10": 16, "-0x1F": -31, "010": 8, "0o10": 8, "+5": 5,
    }  # fmt: skip
    for written, meant in numbers.items():
        assert read_yaml(f"a: {written}") == {"a": meant}, written
    for text in ("12:30", "12:30:10", "190:20:30.15", "2e", "1.2.3", "2024-01-02", "2024-13-45"):
        assert read_yaml(f"a: {text}") == {"a": text}


def test_a_whole_number_may_be_written_as_a_float() -> None:
    """Helm writes a million as 1e+06."""
    pods = SCRIPT + "  kubernetes: {extendedResources: {rdma/hca: 1e+06}}\n"
    assert parse_job(pods).spec.kubernetes.extended_resources == {"rdma/hca": 1_000_000}
    job = parse_job(RECIPE % "steps: 1e+06")
    assert job.spec.entrypoint.recipe is not None
    assert job.spec.entrypoint.recipe.config.steps == 1_000_000


def test_a_value_in_a_pod_template_that_json_cannot_hold_is_refused() -> None:
    text = SCRIPT + "  kubernetes: {podTemplate: {metadata: {annotations: %s}}}\n"
    for written, kind in (("{built: !!timestamp 2024-01-02}", "date"), ("{a: !!set {b}}", "set")):
        with pytest.raises(SpecError, match=f"Object of type {kind} is not JSON"):
            parse_job(text % written)


def test_a_document_that_did_not_come_from_yaml_has_the_same_checks() -> None:
    document = parse_job(SCRIPT).model_dump(mode="json", by_alias=True, exclude_none=True)
    job_from_mapping(document)
    document["metadata"]["labels"] = {"a": "\ud800"}
    with pytest.raises(SpecError, match=r"metadata\.labels\.a: got a text with .* U\+D800"):
        job_from_mapping(document)


DURATIONS = [
    ("recovery", "heartbeatTimeoutSeconds", ""),
    ("recovery", "hangTimeoutSeconds", ""),
    ("recovery", "startupTimeoutSeconds", ""),
    ("recovery", "replacementWaitSeconds", ""),
    ("recovery", "growDelaySeconds", ""),
    ("recovery", "terminationGraceSeconds", ""),
    ("recovery", "capacityTimeoutSeconds", "; leave it out for no limit"),
    ("", "activeDeadlineSeconds", "; leave it out for no limit"),
    ("kubernetes", "startTimeoutSeconds", ""),
]


@pytest.mark.parametrize(("part", "field", "fix"), DURATIONS, ids=[d[1] for d in DURATIONS])
@pytest.mark.parametrize("value", [".inf", ".nan", "1.0e+300", str(limits.MAX_SECONDS + 1)])
def test_no_duration_is_longer_than_a_clock_can_count(
    value: str, part: str, field: str, fix: str, write: Write, holdfast: Holdfast
) -> None:
    line = f"{part}: {{{field}: {value}}}" if part else f"{field}: {value}"
    result = holdfast("spec validate", write(f"{SCRIPT}  {line}\n"))
    assert result.code == 2
    expected = f"expected at most {limits.MAX_SECONDS} seconds (ten years)"
    assert f".{field}: got " in result.err and expected in result.err and fix in result.err


def test_the_longest_durations_are_nanoseconds_that_fit_64_bits() -> None:
    job = parse_job(f"{SCRIPT}  activeDeadlineSeconds: {limits.MAX_SECONDS}\n")
    assert job.spec.active_deadline_s is not None
    assert 2 * round(job.spec.active_deadline_s * SECOND_NS) < 2**63


def test_the_fix_for_an_overlong_time_to_live_is_to_leave_it_out(
    write: Write, holdfast: Holdfast
) -> None:
    result = holdfast("spec validate", write(SCRIPT + f"  ttlSecondsAfterFinished: {10**12}\n"))
    assert result.code == 2
    assert "expected at most 315360000 seconds (ten years); leave it out for no" in result.err


NAMES = [
    (SPEC + "  entrypoint: {module: ''}\n", "spec.entrypoint.module: got ''; expected a module's"),
    (SPEC + "  entrypoint: {module: ..a}\n", "spec.entrypoint.module: got '..a'; expected a mod"),
    (SPEC + "  entrypoint: {module: a.}\n", "spec.entrypoint.module: got 'a.'; expected a module"),
    (SPEC + "  entrypoint: {script: ''}\n", "spec.entrypoint.script: got ''; expected a text that"),
    (RECIPE % "data: {source: ''}", "config.data.source: got ''; expected a text that is not"),
    (
        SCRIPT.replace("name: demo", "name: demo, namespace: 'Not OK!'"),
        "metadata.namespace: got 'Not OK!'; expected lower-case letters",
    ),
    *(
        (text, f"aaa... (File name too long); expected {expected}")
        for text, expected in {
            f"{SPEC}  entrypoint: {{script: {TOO_LONG}}}\n": "a Python file",
            f"{SPEC}  entrypoint: {{module: {TOO_LONG}}}\n": "a module",
            RECIPE % f"data: {{source: {TOO_LONG}}}": "stdlib, or a file",
        }.items()
    ),
]


@pytest.mark.parametrize(("text", "message"), NAMES, ids=range(len(NAMES)))
def test_invalid_names_and_paths_are_refused(
    text: str, message: str, write: Write, holdfast: Holdfast
) -> None:
    result = holdfast("spec validate", write(text))
    assert result.code == 2
    assert message in result.err


def test_a_script_whose_name_is_too_long_is_not_submitted(write: Write, holdfast: Holdfast) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    file = write(f"{SPEC}  entrypoint: {{script: {TOO_LONG}}}\n")
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2
    assert "spec.entrypoint.script: got aaa" in result.err and "name too long" in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"env_vars: {A: 1, A: 2}", "line 1: got the key A twice; expected each key once"),
        (b"env_vars: {A: !!set {b}}", "the document: got Object of type set is not JSON"),
        (b"a: " + 3000 * b"[" + 3000 * b"]", "got too many lists and mappings inside each other"),
        (b"\xff", "(can't decode byte 0xff"),
    ],
    ids=["repeated key", "set", "deep", "not text"],
)
def test_a_runtime_env_is_read_like_a_job(
    text: bytes, message: str, write: Write, holdfast: Holdfast
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    file = write(RECIPE % "")
    other = file.parent / "env.yaml"
    other.write_bytes(text)
    result = holdfast("submit", file, "--ray", NOWHERE, "--runtime-env", other)
    assert result.code == 2
    assert "--runtime-env" in result.err
    assert message.removeprefix("(") in result.err
