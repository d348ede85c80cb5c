"""Commands of README and of the first pages, run exactly as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.local.local_rig import BOUND_S, short
from tests.pages import ROOT, blocks

PAGES = (
    "README.md", "docs/index.md", "docs/user/quickstart-kubernetes.md", "docs/user/script.md",
    "docs/user/python-client.md", "docs/user/plan.md", "docs/user/preflight.md",
)  # fmt: skip
NOT_RUN = {
    "make ": "installs packages into the checkout; test_the_example_survives runs what it runs",
    "pip install ": "installs packages; tests/e2e/local/test_wheel.py installs a wheel",
    ".venv/bin/holdfast ": "needs the job of `make run`; test_the_example_survives runs it",
    "helm install ": "needs a cluster; tests/e2e/kubernetes/test_chart.py installs the chart",
    "kubectl ": "needs a cluster; tests/e2e/kubernetes/test_commands.py applies jobs",
    "curl ": "needs the server of a Kubeflow trainer; tests/unit/runtime has its page",
}
"""Beginning of a command -> why it is not run here. tests/unit/cli/test_printed_commands.py parses
all that begin with holdfast."""
ON_A_CLUSTER = (" --kubernetes", " --ray ")

TRAIN = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
"""
CONFIG = """\
{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
 "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "tie_word_embeddings": false}
"""
ACCELERATE = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n"
LLAMA = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the pages name, and a home of its own."""
    place = tmp_path / "work"
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    (place / "config.json").write_text(CONFIG)
    (place / "accelerate.yaml").write_text(ACCELERATE)
    (place / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1}\n')
    (place / "llama3_8b.toml").write_text(LLAMA)
    (spec,) = [
        text for text in blocks((ROOT / "README.md").read_text(), "yaml") if "apiVersion" in text[0]
    ]
    (place / "my-job.yaml").write_text("\n".join(spec))
    (place / ".venv").symlink_to(Path(sys.executable).parents[1])
    (place / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_HOME", str(short(tmp_path / "home")))
    return place


def commands(page: str) -> list[str]:
    """Each with what follows it in the next lines, inside of quotes."""
    found = [""]
    for block in blocks((ROOT / page).read_text(), "bash"):
        for line in block:
            found[-1] += f"{line}\n"
            with suppress(ValueError):  # of a quotation that is open
                shlex.split(found[-1], comments=True)
                found.append("")
    return [line.strip() for line in found if line.strip()]


def run(line: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=4 * BOUND_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}"
    return done.stdout


def is_run(line: str) -> bool:
    return not line.startswith(tuple(NOT_RUN)) and not any(word in line for word in ON_A_CLUSTER)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", ["README.md", "docs/user/script.md"])
def test_a_script_is_run_by_the_printed_commands(page: str) -> None:
    outputs = {line: run(line) for line in commands(page) if is_run(line)}
    runs = [line for line in outputs if line.startswith(("holdfast run ", "holdfast again "))]
    assert sum(" succeeded after " in text for text in outputs.values()) == len(runs)
    assert any("rank 0 of 4 --lr 3e-4" in text for text in outputs.values())


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("place")
def test_the_quickstart_runs_as_written() -> None:
    first, *lines = commands("docs/user/quickstart-local.md")
    assert first.startswith("pip install ") and len(lines) == 7
    outputs = [run(line) for line in lines]
    assert "incident 1" in outputs[2] and "first  succeeded after " in outputs[4]


@pytest.mark.parametrize("page", ["docs/user/preflight.md", "docs/user/plan.md"])
def test_printed_commands_that_start_nothing_succeed(page: str, place: Path) -> None:
    example = (ROOT / "examples/stdlib-bytes.yaml").read_text()
    (place / "job.yaml").write_text(re.sub(r"\n    gpu: 0.*", "\n    gpu: auto", example))
    lines = commands(page) or blocks((ROOT / page).read_text(), "")[0]
    for line in lines:
        if "--save job.yaml" in line:
            (place / "job.yaml").unlink()
        run(line)


def test_the_first_program_of_the_client_runs(place: Path) -> None:
    (place / "job.yaml").write_text((place / "my-job.yaml").read_text())
    text = (ROOT / "docs/user/python-client.md").read_text()
    (place / "first.py").write_text("\n".join(blocks(text, "python")[0]))
    assert "rank 0 of 4 --lr 3e-4" in run("python first.py")
    call = re.search(r'`(client\.submit\("train\.py".*?\))`', text)
    assert call is not None
    program = f"from holdfast import Client\nclient = Client()\nprint({call[1]}.wait().state)\n"
    (place / "second.py").write_text(program)
    assert run("python second.py") == "succeeded\n"


def test_each_command_that_is_not_run_is_on_a_page_and_each_other_one_is_run() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert [start for start in NOT_RUN if not any(x.startswith(start) for x in lines)] == []
    assert {line.split()[0] for line in lines if is_run(line)} == {"holdfast"}
    assert not blocks((ROOT / "docs/index.md").read_text(), "bash")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("place")
def test_the_example_survives_what_the_readme_does_to_it() -> None:
    """`make run`, without what it installs, and the five lines after it."""
    recipe = re.search(
        r"^run: .*\n\t@.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    lines = [line for line in commands("README.md") if line.startswith(".venv/bin/")]
    assert recipe is not None and [shlex.split(line)[1] for line in lines] == [
        "debug", "debug", "debug", "status", "status"
    ]  # fmt: skip
    with subprocess.Popen(
        shlex.split(recipe[1]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as training:  # fmt: skip
        assert training.stdout is not None
        steps = re.compile(r"(\d+) of \d+ steps")
        at, output = 0, []
        for line in training.stdout:
            output.append(line)
            if (found := steps.search(line)) and int(found[1]) >= at and len(lines) > 2:
                run(lines.pop(0))
                at = int(found[1]) + 30
    text = "".join(output)
    assert training.returncode == 0, text
    assert len(lines) == 2, text
    assert "stdlib-bytes" in run(lines[0]) and "succeeded" in run(lines[1])
