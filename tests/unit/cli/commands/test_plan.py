"""`holdfast spec plan`: of a model without a job, of a job on named devices, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import load_job

from ..conftest import Holdfast

Write = Callable[[str], Path]

SEVENTY = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: llama}
spec:
  entrypoint:
    recipe:
      name: pretrain
      config:
        globalBatch: 64
        model: {dim: 8192, numLayers: 80, numHeads: 64, numKvHeads: 8, ffnDim: 28672,
                vocabSize: 128256}
        data: {sequenceLength: 4096}
  nodes: {max: 1}
  workersPerNode: 8
  resources: {gpu: 1}
"""
MODEL = ("--model", "llama3-8b", "--devices", "8xH100-80")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--model", "llama3-70x", "--devices", "8xH100"), ("'llama3-70x'", "llama3-70b")),
        (("--model", "llama3-8b", "--devices", "8xH100-81"), ("'H100-81'", "H100-80")),
        (
            ("--model", "llama3-8b", "--devices", "65xH100-80"),
            ("--devices: got 65xH100-80", "whole nodes of 8", "64 or 72"),
        ),
        (("--model", "llama3-8b", "--devices", "H100-80"), ("'H100-80'", "write 1xH100-80")),
        (("--model", "llama3-8b", "--devices", "0xH100-80"), ("'0xH100-80'", "one device or more")),
        (("--model", "llama3-8b"), ("--devices: got nothing with --model", "64xH100-80")),
        ((*MODEL, "--method", "nf4"), ("--method: got nf4; expected full, lora or qlora",)),
        ((*MODEL, "--network", "infiniband-401"), ("'infiniband-401'", "infiniband-400")),
        ((*MODEL, "--nodes", "2"), ("--nodes: got 2 with --model", "remove it")),
        ((*MODEL, "--device-memory", "80Gi"), ("--device-memory: got 80Gi with --model",)),
        ((*MODEL, "--environment"), ("--environment: got it with --model", "remove it")),
        (
            ("--model", "gpt3-13b", "--devices", "8xH100-80", "--sequence", "4096"),
            ("--sequence: got 4096 with gpt3-13b", "at most 2048, its position embedding's rows"),
        ),
        (("--model", "absent/config.json", "--devices", "8xH100"), ("--model: got absent",)),
        ((), ("neither a job nor --model", "holdfast spec plan job.yaml")),
    ],
)
def test_a_wrong_option_has_one_message_and_exit_code_two(
    arguments: tuple[str, ...], parts: tuple[str, ...], holdfast: Holdfast
) -> None:
    result = holdfast("spec plan", *arguments)
    assert result.code == 2
    assert result.out == ""
    for part in parts:
        assert part in result.err
    assert "Traceback" not in result.err


def test_a_model_and_a_job_at_once_are_refused(write: Write, holdfast: Holdfast) -> None:
    result = holdfast("spec plan", write(SEVENTY), *MODEL)
    assert result.code == 2
    assert "got a job and --model; expected one of them" in result.err
    for option, value in (("--sequence", "10"), ("--batch", "10"), ("--save", "job.yaml")):
        result = holdfast("spec plan", write(SEVENTY), option, value)
        assert result.code == 2
        assert f"{option}: got {value} with a job" in result.err


@pytest.mark.parametrize("lacking", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_configuration_that_lacks_a_field_names_it(
    lacking: str, tmp_path: Path, holdfast: Holdfast
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: at for name, at in CONFIG.items() if name != lacking}))
    result = holdfast("spec plan", "--model", path, "--devices", "8xH100-80")
    assert result.code == 2
    assert lacking in result.err


@pytest.mark.parametrize("text", ["{hidden_size: 1", "[" * 100_000], ids=["torn", "deep"])
def test_a_configuration_that_is_not_json_is_refused(
    text: str, tmp_path: Path, holdfast: Holdfast
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = holdfast("spec plan", "--model", path, "--devices", "8xH100-80")
    assert result.code == 2
    assert "--model: got" in result.err and "expected JSON" in result.err


def test_a_configuration_of_hugging_face_is_planned(tmp_path: Path, holdfast: Holdfast) -> None:
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps(CONFIG))
    result = holdfast("spec plan", "--model", path, "--devices", "8xH100-80", "--json")
    assert result.code == 0
    made = json.loads(result.out)
    assert made["parameters"] == 1_100_048_384  # TinyLlama's
    assert made["sequence_length"] == 2048  # the longest that it has


def test_a_catalogue_with_a_wrong_unit_names_the_field(tmp_path: Path, holdfast: Holdfast) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("devices:\n  H100-80:\n    memory_bandwidth: 3350GiB\n")
    result = holdfast("spec plan", *MODEL, "--catalogue", path)
    assert result.code == 2
    assert "devices.H100-80.memory_bandwidth" in result.err and "3350GiB" in result.err
    assert "mine.yaml" in result.err


def test_a_catalogue_of_the_user_changes_the_plan(tmp_path: Path, holdfast: Holdfast) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "devices:\n  H100-80:\n    price: {per_hour: 1.00USD/h, date: 2026-11-25}\n"
        "    memory: 40GiB\n"
    )
    (usual, mine) = (
        json.loads(holdfast("spec plan", *MODEL, "--json", *more).out)
        for more in ((), ("--catalogue", str(path)))
    )
    assert mine["device_memory_bytes"] == 40 * 2**30 < usual["device_memory_bytes"]
    per_day = mine["estimate"]["time"]["dollars_per_day"]
    assert per_day == pytest.approx(8 * 24 * 1.00)


def test_the_plan_of_a_model_is_the_same_in_text_and_json(holdfast: Holdfast) -> None:
    text = holdfast("spec plan", *MODEL)
    made = json.loads(holdfast("spec plan", *MODEL, "--json").out)
    assert text.code == 0
    assert text.out.startswith(made["verdict"])
    assert made["fits"] is True
    chosen = made["chosen"]
    assert made["alternatives"][0] == chosen
    assert chosen["why"] == "" and all(one["why"] for one in made["alternatives"][1:])
    assert chosen["peak_bytes"] == made["estimate"]["peak_bytes"]
    assert chosen["peak_bytes"] <= 0.8 * made["device_memory_bytes"]
    time = made["estimate"]["time"]
    assert chosen["tokens_per_s"] == pytest.approx(time["tokens_per_s"])
    assert 0.2 < time["mfu"] < 0.7
    assert time["seconds"] == pytest.approx(sum(row["seconds"] for row in time["rows"]))
    assert time["exposed_seconds"] == pytest.approx(
        sum(row["seconds"] for row in time["rows"] if row["exposed"])
    )
    assert max(made["estimate"]["phases"].values()) == made["estimate"]["peak_bytes"]
    for part in ("Strategies that fit", f"{chosen['tokens_per_s']:,.0f}", "price: $"):
        assert part in text.out


def test_adapters_are_planned_with_the_sizes_of_what_they_write(holdfast: Holdfast) -> None:
    how = ("--model", "llama3-8b", "--method", "qlora", "--devices", "1xA100-40")
    result = holdfast("spec plan", *how, "--explain")
    assert result.code == 0 and result.out.startswith("fits: QLoRA of llama3-8b (8.0 B)")
    sizes = "41.9 M trained (0.52%), 480 MiB in a checkpoint; merged: 15.0 GiB"
    shown = " ".join(result.out.split())
    assert sizes in shown and "0.5159 x the matrices of the blocks + 2 x the rest" in shown
    refused = holdfast("spec plan", *how, "--save", "job.yaml")
    assert (refused.code, "--save: got --method qlora" in refused.err) == (2, True)


def test_explain_shows_formula_and_source_of_every_figure(holdfast: Holdfast) -> None:
    made = json.loads(holdfast("spec plan", *MODEL, "--json").out)["estimate"]
    result = holdfast("spec plan", *MODEL, "--explain")
    assert result.code == 0
    shown = " ".join(result.out.split())
    for row in (*made["memory"], *made["traffic"], *made["time"]["rows"]):
        assert row["formula"] and row["source"]
        assert " ".join(row["formula"].split()) in shown, row["what"]


def test_a_model_that_does_not_fit_is_refused_with_its_states(holdfast: Holdfast) -> None:
    result = holdfast("spec plan", "--model", "llama3-405b", "--devices", "2xH100-80")
    assert result.code == 2
    assert result.out.startswith("does not fit: llama3-405b")
    assert "its states take" in result.out


def test_the_saved_job_is_valid_and_is_the_one_that_was_planned(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    path = tmp_path / "job.yaml"
    result = holdfast("spec plan", *MODEL, "--save", path, "--json")
    assert result.code == 0
    assert holdfast("spec validate", path).code == 0
    made = json.loads(result.out)
    again = json.loads(holdfast("spec plan", path, "--devices", "8xH100-80", "--json").out)
    assert again["mesh"] == made["chosen"]["mesh"]
    for figure in ("micro_batch", "num_micro_batches", "peak_bytes", "flops_per_step"):
        assert again["estimate"][figure] == made["estimate"][figure], figure
    seconds = (one["estimate"]["time"]["seconds"] for one in (again, made))
    assert next(seconds) == pytest.approx(next(seconds))
    assert load_job(path).spec.workers_per_node == 8


def test_a_model_that_the_recipe_does_not_have_cannot_be_saved(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    path = tmp_path / "job.yaml"
    result = holdfast("spec plan", "--model", "gpt3-13b", "--devices", "8xH100-80", "--save", path)
    assert result.code == 2
    assert "--save: got gpt3-13b" in result.err and "RMSNorm" in result.err
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, holdfast: Holdfast) -> None:
    result = holdfast("spec plan", *MODEL, "--save", tmp_path / "absent" / "file")
    assert result.code == 2
    assert f"--save: got {tmp_path}" in result.err


def test_a_job_that_does_not_fit_has_three_ways_and_exit_code_two(
    write: Write, holdfast: Holdfast
) -> None:
    file = write(SEVENTY)
    result = holdfast("spec plan", file, "--devices", "8xH100-80")
    assert result.code == 2
    assert result.out.startswith("llama: does not fit: ")
    assert result.out.count("\nfits with ") == 3
    result = holdfast("spec plan", file, "--devices", "8xH100", "--json")
    made: dict[str, Any] = json.loads(result.out)
    assert made["fits"] is False and len(made["ways"]) == 3
    for way in made["ways"]:
        assert way["num_bytes"] <= 0.8 * made["device_memory_bytes"]
        assert way["step_ratio"] > 0


def test_a_job_on_cpus_whose_states_no_machine_holds_is_refused(
    write: Write, holdfast: Holdfast
) -> None:
    """1.1 TB of states."""
    file = write(SEVENTY.replace("gpu: 1", "gpu: 0"))
    planned = holdfast("spec plan", file)
    assert planned.code == 2
    assert planned.out.startswith("llama: does not fit: the states of a worker alone")
    started = holdfast("run", file)
    assert started.code == 2
    assert "spec.parallelism: got " in started.err and "main memory" in started.err


def test_a_job_on_named_devices_is_timed(write: Write, holdfast: Holdfast) -> None:
    file = write(SEVENTY.replace("nodes: {max: 1}", "nodes: {max: 16}"))
    result = holdfast("spec plan", file, "--devices", "128xH100-80", "--json")
    made = json.loads(result.out)
    assert made["num_nodes"] == 16
    assert made["estimate"]["time"]["device"] == "H100-80"
    result = holdfast("spec plan", file, "--devices", "12xH100-80")
    assert result.code == 2
    assert "--devices: got 12xH100-80; expected whole nodes of 8 workers x 1 GPU" in result.err
    result = holdfast("spec plan", file, "--devices", "8xH100-80", "--devices", "8xH200")
    assert result.code == 2
    assert "2 kinds with a job" in result.err


def test_a_job_is_ranked_beside_the_strategies_of_its_devices(
    write: Write, holdfast: Holdfast
) -> None:
    full = "  parallelism: {shard: world, activationCheckpointing: {full: {}}}\n"
    file = write(SEVENTY.replace("nodes: {max: 1}", "nodes: {max: 8}") + full)
    devices = ("--devices", "64xH100-80")
    made = json.loads(holdfast("spec plan", file, *devices, "--json").out)["strategies"]
    of_job = made["alternatives"][made["of_job"]]
    assert (of_job["strategy"], of_job["mesh"]["shard"]) == ("FSDP", 64)
    rates = [one["tokens_per_s"] for one in made["alternatives"]]
    assert made["of_job"] > 0 and rates[0] > of_job["tokens_per_s"]
    assert "slower: " in of_job["why"]
    assert "DDP" in {one["strategy"] for one in made["lost"]}
    text = holdfast("spec plan", file, *devices).out
    assert "Strategies that fit, best first" in text and "FSDP, this job" in text


OFFLOADED = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: offloaded}
spec:
  entrypoint:
    recipe:
      name: pretrain
      config:
        globalBatch: 8
        model: {dim: 4096, numLayers: 32, numHeads: 32, vocabSize: 128256}
        data: {sequenceLength: 1024}
  nodes: {max: 1}
  workersPerNode: 8
  parallelism: {shard: 8, offload: cpu, activationCheckpointing: {full: {}}}
  resources: {gpu: 1}
"""


@pytest.mark.parametrize(
    ("more", "fits", "said"),
    [
        ((), True, "240 GiB of main memory per worker, assumed"),
        (("--host-memory", "2Ti"), True, "229.4 GiB of main memory per worker, of what its node"),
        (("--host-memory", "64Gi"), False, "do not fit into 6.2 GiB of main memory per worker"),
    ],
)
def test_offload_is_planned_with_the_main_memory_of_a_node(
    more: tuple[str, ...], fits: bool, said: str, tmp_path: Path, holdfast: Holdfast
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(OFFLOADED)
    result = holdfast("spec plan", path, "--devices", "8xH100-80", *more)
    assert result.code == (0 if fits else 2), result.out
    assert said in " ".join(result.out.split())


def test_a_model_is_offloaded_only_into_main_memory_that_holds_it(holdfast: Holdfast) -> None:
    big = ("spec plan", "--model", "llama3-8b", "--devices", "1xRTX-4090", "--json")
    few = ("spec plan", "--model", "llama3-70b", "--devices", "8xH100-80", "--json")
    assert json.loads(holdfast(*big).out)["offload_memory"] == ""
    roomy = json.loads(holdfast(*few, "--host-memory", "4Ti").out)
    tight = json.loads(holdfast(*few, "--host-memory", "256Gi").out)
    assert roomy["fits"] and roomy["offload_memory"].startswith("459.8 GiB of main memory")
    assert tight["fits"] is False
