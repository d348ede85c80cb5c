"""Mistakes in a spec: output and exit code. tests/unit/api/wrong_jobs.py has the other rules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import training_packages

from .conftest import Holdfast

Write = Callable[[str], Path]

SPEC = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
"""
SCRIPT = SPEC + "  entrypoint: {script: train.py}\n"
RECIPE = SPEC + "  entrypoint: {recipe: {name: pretrain, config: {%s}}}\n"

CASES = [
    pytest.param(SCRIPT + "  nodez: {min: 1}\n",
        ["spec.nodez: got an unknown key", "did you mean nodes?"], id="a misspelt key"),
    pytest.param(SCRIPT + "  preload: [transformers, ./train.py]\n",
        ["spec.preload.1: got './train.py'", "a module's full name, such as package.train"],
        id="a path among the modules to preload"),
    pytest.param(SCRIPT + "  nodes: {max: 4}\n  workersPerNode: 2\n  elasticity: [3, 8]\n",
        ["spec.elasticity: got 3 workers; expected multiples of workersPerNode (2)"],
        id="a part of a node"),
    pytest.param(SCRIPT + "  nodes: {max: 4}\n  elasticity: [2, 8]\n",
        ["spec.elasticity: got 8 workers; expected sizes from 1", "to 4 (nodes.max 4 x 1)"],
        id="a size that the nodes cannot have"),
    pytest.param(RECIPE % "" + "  checkpoint: {guard: {never: {}}}\n",
        ["spec.checkpoint.guard: got it with a recipe", "remove the field"],
        id="a guard of checkpoints that a recipe does not write"),
    pytest.param(SPEC + "  entrypoint: {script: t.py, resumeArgs: [--resume, '{ckpt}']}\n",
        ["spec.entrypoint.resumeArgs: got {ckpt}; expected {checkpoint}"],
        id="another placeholder"),
    pytest.param(
        SPEC
        + "  entrypoint: {script: t.py, resumeArgs: [--resume]}\n"
        "  checkpoint: {guard: {never: {}}}\n",
        ["spec.entrypoint.resumeArgs: got it with checkpoint.guard: {never: {}}"],
        id="arguments to resume without a guard that finds the checkpoint",
    ),
    pytest.param(SCRIPT + "  checkpoint: {guard: never}\n",
        ["expected each choice as a key; write guard: {never: {}}"],
        id="a guard as a word"),
    pytest.param(SCRIPT + "  parallelism: {pipeline: 2}\n",
        ["expected each choice as a key; write pipeline: {ranks: 2}"],
        id="a pipeline as a number"),
    pytest.param(RECIPE % "" + "  workersPerNode: 2\n  parallelism: {ddp: {}, shard: 2}\n",
        ["spec.parallelism.shard: got 2 with ddp; expected 1; remove one of the two"],
        id="shards of DDP"),
    pytest.param(SCRIPT + "  env: {TEXT: " + "x" * 131_072 + "}\n",
        ["spec.env.TEXT: got 131072 bytes; expected at most 131066", "write the text to a file"],
        id="a variable that no process can have"),
    pytest.param(SCRIPT + "  resources: {gpu: some}\n",
        ["spec.resources.gpu: got 'some'; expected auto or"], id="a word for a number of GPUs"),
    pytest.param(SCRIPT + "  resources: {memory: 64GB}\n",
        ["spec.resources.memory: got '64GB'", "write 64Gi (powers of 1024) or 64G (of 1000)"],
        id="a unit that is no quantity"),
    pytest.param(SCRIPT + "  resources: {cpu: 4 cores}\n",
        ["spec.resources.cpu: got '4 cores'", "write 4"], id="a quantity with a word"),
    pytest.param(SCRIPT + "  workersPerNode: 0\n",
        ["spec.workersPerNode: got 0", "greater than or equal to 1"], id="a number out of range"),
    pytest.param(
        SCRIPT + "  nodes: {min: 2, max: 2}\n  workersPerNode: 4\n  parallelism: {shard: 3}\n",
        ["spec.parallelism.shard: got 3", "divisor of 8 workers", "use 1, 2, 4 or 8"],
        id="an impossible mesh",
    ),
    pytest.param(
        SCRIPT + "  workersPerNode: 4\n  parallelism: {shard: 4, fsdp: {reshardAfterForward: 3}}\n",
        ["spec.parallelism.fsdp.reshardAfterForward: got 3", "divisor of shard (4)"],
        id="a reshard size that does not divide",
    ),
    pytest.param(
        RECIPE % "model: {numLayers: 2}"
        + "  workersPerNode: 2\n"
        + "  parallelism: {pipeline: {ranks: 2, schedule: interleaved1f1b}}\n",
        ["spec.parallelism.pipeline.ranks: got 2, 4 stages with 2 on each rank; expected", "(2)"],
        id="fewer layers than stages",
    ),
    pytest.param(
        RECIPE % "globalBatch: 4, microBatch: 2"
        + "  workersPerNode: 4\n  parallelism: {pipeline: {ranks: 4}}\n",
        [
            "spec.parallelism.pipeline.ranks: got 4; expected at most the number of micro-batches "
            "of a step (2: globalBatch 4 over 1 ranks",
            "raise globalBatch or lower microBatch",
        ],
        id="fewer micro-batches than ranks of a pipeline",
    ),
    pytest.param(
        RECIPE % "" + "  workersPerNode: 2\n"
        "  parallelism: {pipeline: {ranks: 2, stagesPerRank: 2}}\n",
        ["spec.parallelism.pipeline.stagesPerRank: got 2; expected 1 with schedule 1f1b"],
        id="two stages on a rank for a schedule of one",
    ),
    pytest.param(
        RECIPE % "model: {numLayers: 6}" + "  workersPerNode: 2\n  parallelism:\n"
        "    {pipeline: {ranks: 2, schedule: zbvZeroBubble, stagesPerRank: 3}}\n",
        ["stagesPerRank: got 3; expected 2 with schedule zbvZeroBubble"],
        id="three stages on a rank for a V",
    ),
    pytest.param(
        RECIPE % "compile: true" + "  workersPerNode: 2\n"
        "  parallelism: {pipeline: {ranks: 2, schedule: zbvZeroBubble}}\n",
        ["spec.parallelism.pipeline.schedule: got zbvZeroBubble with compile: true", "use interle"],
        id="compiled blocks in a zero bubble schedule",
    ),
    pytest.param(RECIPE % "" + "  parallelism: {pipeline: {schedule: gpipe}}\n",
        ["spec.parallelism.pipeline.ranks: got nothing; expected a value"],
        id="a schedule without a pipeline"),
    pytest.param(RECIPE % "" + "  workersPerNode: 3\n  parallelism: {tensor: 3}\n",
        ["spec.parallelism.tensor: got 3; expected a divisor of model.numHeads (4)"],
        id="a tensor axis that does not divide the heads"),
    pytest.param(
        SCRIPT + "  nodes: {min: 2, max: 2}\n  parallelism: {tensor: 2}\n",
        [
            "spec.parallelism.tensor: got 2; expected a divisor of workersPerNode (1)",
            "or set parallelism.tensorOverNodes: true as well",
        ],
        id="a tensor axis of a script over two nodes",
    ),
    pytest.param(
        RECIPE % "data: {sequenceLength: 127}"
        + "  workersPerNode: 2\n  parallelism: {tensor: 2}\n",
        ["spec.parallelism.tensor: got 2; expected a divisor of data.sequenceLength (127)"],
        id="a tensor axis that does not divide the sequence",
    ),
    pytest.param(SCRIPT + "  parallelism: {activationCheckpointing: {full: {}}}\n",
        ["spec.parallelism.activationCheckpointing: got a value for a script", "remove the field"],
        id="a field that only the recipe follows"),
    pytest.param(
        RECIPE % "" + "  parallelism: {activationCheckpointing: {full: {everyNthBlock: 5}}}\n",
        ["full.everyNthBlock: got 5; expected at most 4", "lower it, or remove"],
        id="every fifth of four blocks",
    ),
    pytest.param(RECIPE % "" + "  workersPerNode: 3\n  parallelism: {context: 3}\n",
        ["spec.parallelism.context: got 3", "(128) in 2 x context pieces (6)"],
        id="a context axis that does not divide the sequence into two pieces for each rank"),
    pytest.param(
        RECIPE % "data: {sequenceLength: 24}"
        + "  workersPerNode: 16\n  parallelism: {context: 4, tensor: 4}\n",
        ["spec.parallelism.context: got 4", "(24) in context x tensor parts (16)"],
        id="context and tensor axes that do not divide the sequence together",
    ),
    pytest.param(
        RECIPE % "model: {numHeads: 4, numKvHeads: 2}"
        + "  workersPerNode: 2\n  resources: {gpu: 1}\n"
        + "  parallelism: {context: 2, precision: {parameters: float32}}\n",
        ["spec.parallelism.context: got 2 with precision.parameters float32 and 2 key and value"],
        id="a context axis on GPUs in a format without a kernel",
    ),
    pytest.param(SCRIPT + "  env: {DEBUG: yes}\n",
        ["spec.env.DEBUG: got True; expected a valid string", "put it in quotes"],
        id="a boolean where a string must stand"),
    pytest.param(SCRIPT + "  nodes: {max: 8}\n  elasticity: [8, 8]\n",
        ["spec.elasticity: got 8 workers more than once; expected each size once"],
        id="a world size that is written twice"),
    pytest.param(SCRIPT + "  nodes: {min: 1, max: 8}\n  elasticity: fixed\n",
        ["spec.nodes.min: got 1 with elasticity: fixed; expected 8"],
        id="a minimum below a fixed size"),
    pytest.param(SCRIPT.replace("demo", "Demo_1"),
        ["metadata.name: got 'Demo_1'", "with no dash; for example demo-1"],
        id="a name that is no host name"),
    pytest.param(SCRIPT.replace("v1alpha1", "v9"),
        ["apiVersion: got 'holdfast.dev/v9'; expected holdfast.dev/v1alpha1"],
        id="a version of the future"),
    pytest.param("[1, 2]", ["the document: got list; expected a mapping"], id="not a mapping"),
    pytest.param("", ["the document: got nothing"], id="an empty file"),
    pytest.param("a: [", ["line 1, column 5: got text that", "valid YAML"], id="not YAML"),
    pytest.param(SPEC + "  entrypoint: {script: nope.py}\n",
        ["spec.entrypoint.script: got nope.py", "does not exist", "spec.workingDirectory"],
        id="a script that does not exist"),
    pytest.param(SPEC + "  entrypoint: {module: no_such_module_here.train}\n",
        ["spec.entrypoint.module", "no module no_such_module_here"],
        id="a module that does not exist"),
    pytest.param(SCRIPT + "  workingDirectory: nowhere\n",
        ["spec.workingDirectory: got nowhere", "not a directory"],
        id="a working directory that does not exist"),
    pytest.param(RECIPE % "data: {source: missing.txt}",
        ["config.data.source: got missing.txt", "does not exist", "stdlib"],
        id="data that does not exist"),
    pytest.param(SCRIPT + "  checkpoint: {path: train.py/below}\n",
        ["spec.checkpoint.path: got train.py/below"], id="a checkpoint path below a file"),
    pytest.param(SCRIPT + "  checkpoint: {path: /proc/holdfast}\n",
        ["spec.checkpoint.path: got /proc/holdfast (", "a directory or URL that can be written"],
        id="a checkpoint path that cannot be written"),
    pytest.param(SCRIPT + "  checkpoint: {path: 'nofs://bucket/x'}\n",
        ["spec.checkpoint.path: got nofs://bucket/x"], id="a URL of an unknown kind"),
    *(
        pytest.param(
            text,
            [f"{field}: got ~no-such-user/x (no home is known here for its ~)"],
            id=f"the home of a stranger in {field}",
        )
        for field, text in {
            "spec.workingDirectory": SCRIPT + "  workingDirectory: ~no-such-user/x\n",
            "spec.entrypoint.script": SPEC + "  entrypoint: {script: ~no-such-user/x}\n",
            "spec.entrypoint.recipe.config.data.source": RECIPE % "data: {source: ~no-such-user/x}",
            "spec.checkpoint.path": SCRIPT + "  checkpoint: {path: ~no-such-user/x}\n",
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CASES)
def test_a_mistake_in_the_spec_is_named_and_exits_with_2(
    text: str, message: list[str], write: Write, holdfast: Holdfast
) -> None:
    path = write(text)
    before = sorted(p.name for p in path.parent.iterdir())
    result = holdfast("spec validate", path)
    assert result.code == 2
    for part in message:
        assert part in result.err
    assert "expected" in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert sorted(p.name for p in path.parent.iterdir()) == before


@pytest.mark.parametrize(("text", "message"), CASES[-10:])
def test_run_makes_the_same_checks_and_leaves_nothing_behind(
    text: str, message: list[str], write: Write, holdfast: Holdfast
) -> None:
    path = write(text)
    result = holdfast("run", path)
    assert result.code == 2
    assert message[0] in result.err
    assert not (path.parent / "home").exists()


def test_all_mistakes_are_listed_not_only_the_first(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("spec validate", write(SCRIPT + "  nodes: {min: x}\n  workersPerNode: 0\n"))
    assert "2 problems in the job spec" in result.err


def test_mistakes_as_json(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("spec validate", "--json", write(SCRIPT + "  workersPerNode: 0\n"))
    assert result.code == 2
    found = json.loads(result.out)
    assert found["valid"] is False
    assert found["problems"][0]["field"] == "spec.workersPerNode"
    assert found["problems"][0]["got"] == "0"


def test_a_spec_file_that_does_not_exist(tmp_path: Path, holdfast: Holdfast) -> None:
    for verb in ("spec validate", "spec plan", "run"):
        result = holdfast(verb, tmp_path / "nope.yaml")
        assert result.code == 2
        assert "nope.yaml: cannot be read (No such file or directory)" in result.err


def test_a_spec_file_that_is_not_text(tmp_path: Path, holdfast: Holdfast) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    result = holdfast("spec validate", path)
    assert result.code == 2
    assert "cannot be read" in result.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_without_permission_are_reported(write: Write, holdfast: Holdfast) -> None:
    path = write(SCRIPT + "  checkpoint: {path: locked}\n")
    (path.parent / "train.py").chmod(0)
    (path.parent / "locked").mkdir(mode=0o500)
    result = holdfast("spec validate", path)
    assert result.code == 2
    assert "spec.entrypoint.script" in result.err
    assert "spec.checkpoint.path" in result.err


def test_a_checkpoint_path_that_can_be_written_is_left_as_it_was(
    write: Write, holdfast: Holdfast
) -> None:
    path = write(SCRIPT + "  checkpoint: {path: new/place}\n")
    assert holdfast("spec validate", path).code == 0
    assert not (path.parent / "new").exists()


def test_validate_describes_a_valid_spec(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("spec validate", write(SCRIPT + "  nodes: {max: 2}\n  workersPerNode: 2\n"))
    assert result.code == 0
    assert "2 nodes x 2 workers; with the session, HSDP: replicate 2 x shard 2" in result.out


def test_packages_that_are_missing_here_are_a_note_of_validate_and_an_error_of_run(
    write: Write, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_packages, "PARTS", ("json", "no_such_package"))
    path = write(RECIPE % "")
    noted, failed = holdfast("spec validate", path), holdfast("run", path)
    assert noted.code == 0 and "cannot run on this machine: this Python needs torch" in noted.out
    assert failed.code == 2 and "missing: no_such_package; pip install" in failed.err
