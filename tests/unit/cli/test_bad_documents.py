"""Documents that YAML reads, or almost: each is refused at once, with its field and in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, parse_job
from holdfast.orchestrator.api.v1alpha1.document import faults, read
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.errors import SpecError

from .conftest import Holdfast
from .test_bad_input import RECIPE, SCRIPT, SPEC

Write = Callable[[str], Path]
TOO_LONG = 5000 * "a"
NOWHERE = "http://127.0.0.1:1"
"""An address that is asked only after the checks of the files."""

LINES = [  # what stands in the spec's last line, and what is said of it
    ("env: {A: 2024-13-45}", "spec.env.A: got 2024-13-45 in line 7; expected a date that there is"),
    ("env: {A: 2024-01-02}", "spec.env.A: got 2024-01-02, which YAML takes for a date"),
    ("env: {MY_TOKEN: 2024-13-45}", "spec.env.MY_TOKEN: got (hidden) in line 7; expected a date"),
    ("env: {MY_TOKEN: 2024-01-02}", "spec.env.MY_TOKEN: got (hidden), which YAML takes for"),
    ("suspend: !!bool perhaps", "spec.suspend: got perhaps in line 7; expected a value that bool"),
    ("image: !!timestamp x", "spec.image: got x in line 7; expected a date that there is"),
    ("priority: !!int ''", "spec.priority: got  in line 7; expected an integer"),
    (f"nodes: {{max: {5000 * '9'}}}", "... in line 7; expected an integer of fewer digits"),
    (
        f"nodes: {{max: {30 * '9'}}}",
        "spec.nodes.max: got 999999999999999999999999999999; expected ",
    ),
    (f"env: {3000 * '['}{3000 * ']'}", "spec.env.0.0: got more than 64 levels"),
    (f"env: {3000 * '{'}{3000 * '}'}", "spec.env: got more than 64 levels"),
    ('"\\ud800": {a: !!int "\\ud800"}', "spec.\\ud800.a: got \\ud800 in line 7; expected an int"),
    ('{"\\ud800": 1, "\\ud800": 2}: 3', "got the key \\ud800 twice, in line 7"),
    ("env: {A: &a [&b [*b]]}", "spec.env.A.0.0: got *b in line 7, inside of what it stands for"),
    (
        "kubernetes: {podTemplate: &a {spec: *a}}",
        "spec.kubernetes.podTemplate.spec: got *a in line",
    ),
    ("env: {A: '1'}\n  env: {B: '2'}", "spec.env: got the key env twice, in lines 7 and 8; "),
    ("env: {A: '1', 'A': '2'}", "spec.env.A: got the key A twice, in line 7; expected each key"),
    ('env: {A: "x\\0y"}', "spec.env.A: got a text with the character U+0000 in it"),
    ('env: {A: "\\ud800"}', "spec.env.A: got a text with the character U+D800 in it"),
    ('env: {"A\\0": x}', "spec.env: got a key with the character U+0000 in it"),
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


@pytest.mark.parametrize(("line", "told"), LINES, ids=[line[:40] for line, _told in LINES])
@pytest.mark.parametrize("verb", ["validate", "plan", "run"])
def test_what_cannot_be_read_or_handed_on_is_named_by_its_field(
    verb: str, line: str, told: str, write: Write, holdfast: Holdfast
) -> None:
    result = holdfast(verb, write(f"{SCRIPT}  {line}\n"))
    assert result.code == 2
    assert told in result.err
    assert "Traceback" not in result.err
    assert not (write(SCRIPT).parent / "home").exists()


def test_they_are_told_as_json_too(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("validate", "--json", write(SCRIPT + "  env: {A: 2024-13-45}\n"))
    assert result.code == 2
    assert json.loads(result.out)["problems"][0]["field"] == "spec.env.A"


def test_a_few_aliases_do_not_stand_for_more_than_memory_holds(
    write: Write, holdfast: Holdfast
) -> None:
    bomb = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for n in range(1, 20):
        bomb += f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]\n"
    result = holdfast("validate", write(bomb))
    assert result.code == 2
    assert "the document: got more than 100000 values, those of aliases counted" in result.err


def test_aliases_and_merges_that_end_are_read() -> None:
    document = read("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n")
    assert document["b"] == {"x": 3, "y": 2}
    assert document["c"] == [{"x": 1, "y": 2}] * 2
    assert faults(document) == []


def test_numbers_are_what_kubectl_takes_for_numbers() -> None:
    """Both sides of this are what `helm template` made of the same texts (Helm 3.22)."""
    numbers = {
        "1e-4": 0.0001, "1e+06": 1e6, "1E5": 1e5, "1.0e-4": 0.0001, ".5": 0.5, "1.": 1.0,
        "1.e3": 1e3, "1_000": 1000, "0x10": 16, "-0x1F": -31, "010": 8, "0o10": 8, "+5": 5,
    }  # fmt: skip
    for written, meant in numbers.items():
        assert read(f"a: {written}") == {"a": meant}, written
    for text in ("12:30", "12:30:10", "190:20:30.15", "2e", "1.2.3"):
        assert read(f"a: {text}") == {"a": text}


def test_a_whole_number_may_be_written_as_a_float() -> None:
    """As a chart writes a million."""
    pods = SCRIPT + "  kubernetes: {extendedResources: {rdma/hca: 1e+06}}\n"
    assert parse_job(pods).spec.kubernetes.extended_resources == {"rdma/hca": 1_000_000}
    job = parse_job(RECIPE % "steps: 1e+06")
    assert job.spec.entrypoint.recipe is not None
    assert job.spec.entrypoint.recipe.config.steps == 1_000_000


def test_what_is_no_text_in_a_pod_is_refused_too() -> None:
    text = SCRIPT + "  kubernetes: {podTemplate: {metadata: {annotations: %s}}}\n"
    for written, told in (("{built: 2024-01-02}", "a date"), ("{a: !!set {b}}", "a set")):
        with pytest.raises(SpecError, match=rf"spec\.kubernetes\.podTemplate.*{told}"):
            parse_job(text % written)


def test_a_document_that_did_not_come_from_yaml_is_held_to_the_same() -> None:
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
    result = holdfast("validate", write(f"{SCRIPT}  {line}\n"))
    assert result.code == 2
    expected = f"expected at most {limits.MAX_SECONDS} seconds (ten years)"
    assert f".{field}: got " in result.err and expected in result.err and fix in result.err


def test_the_longest_durations_are_nanoseconds_that_fit_64_bits() -> None:
    job = parse_job(f"{SCRIPT}  activeDeadlineSeconds: {limits.MAX_SECONDS}\n")
    assert job.spec.active_deadline_s is not None
    assert 2 * round(job.spec.active_deadline_s * SECOND_NS) < 2**63


def test_records_that_are_to_stay_for_ever_have_no_time(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("validate", write(SCRIPT + f"  ttlSecondsAfterFinished: {10**12}\n"))
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


@pytest.mark.parametrize(("text", "told"), NAMES, ids=range(len(NAMES)))
def test_names_that_nothing_can_have_are_refused(
    text: str, told: str, write: Write, holdfast: Holdfast
) -> None:
    result = holdfast("validate", write(text))
    assert result.code == 2
    assert told in result.err


def test_a_script_whose_name_is_too_long_is_not_handed_in(write: Write, holdfast: Holdfast) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")
    file = write(f"{SPEC}  entrypoint: {{script: {TOO_LONG}}}\n")
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2
    assert "spec.entrypoint.script: got aaa" in result.err and "name too long" in result.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"env_vars: {A: 2024-13-45}", "env_vars.A: got 2024-13-45 in line 1; expected a date"),
        (b"env_vars: {MY_TOKEN: 2024-01-02}", "env_vars.MY_TOKEN: got (hidden), which YAML takes"),
        (b"a: " + 3000 * b"[" + 3000 * b"]", "a.0.0.0: got more than 64 levels"),
        (b"\xff", "(can't decode byte 0xff"),
    ],
    ids=["no date", "a date", "deep", "no text"],
)
def test_a_runtime_env_is_read_like_a_job(
    text: bytes, told: str, write: Write, holdfast: Holdfast
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")
    file = write(RECIPE % "")
    other = file.parent / "env.yaml"
    other.write_bytes(text)
    result = holdfast("submit", file, "--ray", NOWHERE, "--runtime-env", other)
    assert result.code == 2
    assert "--runtime-env" in result.err
    assert told.removeprefix("(") in result.err
