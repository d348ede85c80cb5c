"""The recipe finetune beside transformers and PEFT in one process: losses, and what it writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.recipe import Finetune
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session.order import sample_ids
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.recipes.finetune import MARKER, expect_free, with_adapters
from tests.e2e.local.local_rig import Job
from tests.strategies.rig import Numbers, compare, lose_a_worker_and_a_node, losses_of, several

from .tiny_models import KINDS, SIZES, make_lines, make_model, make_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NEEDS = ("transformers", "peft", "torchao")
STEPS, BATCH, LENGTH, RATE, SEED = 4, 4, 64, 2e-3, 3
RATES = {"learningRate": RATE, "warmupSteps": 0, "learningRateSchedule": {"constant": {}}}
DIGITS = 2e-3
FILES = {"model": "m", "data": "d", "output": "o", "method": "lora"}
RANKS = {"1": (1, {"shard": 1}), "FSDP 2": (2, {"shard": 2}), "HSDP 2 x 2": (4, {"shard": 2}),
         "DDP 2": (2, {"shard": 1}), "TP 2": (2, {"tensor": 2}),
         "TP 2 x FSDP 2": (4, {"tensor": 2, "shard": 2})}  # fmt: skip
CASES = [("llama", "full"), ("qwen2", "full"), ("qwen3", "lora"), ("mistral", "lora"),
         ("wide", "qlora")]  # fmt: skip


def document(
    name: str, place: Path, kind: str, workers: int, mesh: dict[str, Any], **config: Any
) -> dict[str, Any]:
    config = {
        "model": str(place / kind), "data": str(place / "data.jsonl"), "output": str(place / name),
        "steps": STEPS, "globalBatch": BATCH, "sequenceLength": LENGTH, "seed": SEED,
        "optimizer": RATES, **config,
    }  # fmt: skip
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"recipe": {"name": "finetune", "config": config}},
            "workersPerNode": workers,
            "resources": {"cpu": 1, "gpu": 0},
            "parallelism": mesh,
        },
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    made = tmp_path_factory.mktemp("finetune")
    for kind in KINDS:
        make_model(made / kind, kind)
    make_model(made / "wide", "llama", hidden_size=256, intermediate_size=512)
    make_lines(made / "data.jsonl", 60)
    return made


def documents(place: Path) -> list[list[tuple[int, bool]]]:
    """Tokens of each line, at most LENGTH, with whether each has a loss."""
    tokenizer, lines = make_tokenizer(), (place / "data.jsonl").read_text().splitlines()

    def part(text: str, trained: bool, end: bool = False) -> list[tuple[int, bool]]:
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * end
        return [(number, trained) for number in ids]

    found = []
    for line in map(json.loads, lines):
        if text := line.get("text"):
            tokens = part(text, True, end=True)
        elif prompt := line.get("prompt"):
            tokens = part(prompt, False) + part(line["completion"], True, end=True)
        else:
            tokens = []
            for message in line["messages"]:
                answers = message["role"] == "assistant"
                tokens += part(f"<{message['role']}>", False)
                tokens += part(message["content"], answers, end=True)
        found.append(tokens[:LENGTH])
    return found


def samples(place: Path) -> list[list[list[tuple[int, bool]]]]:
    """Documents of each sample: as many in the order of the file as have room."""
    packed: list[list[list[tuple[int, bool]]]] = []
    room = 0
    for document in documents(place):
        if len(document) > room:
            packed.append([])
            room = LENGTH
        packed[-1].append(document)
        room -= len(document)
    return packed


def round_to_nf4(model: Any) -> None:
    """Give the matrices of the blocks the values that NF4 has for them."""
    from torchao.quantization import NF4Tensor

    for name, one in model.named_parameters():
        if ".layers." in name and one.ndim == 2:
            one.data = NF4Tensor.from_tensor(one.data, 64, 256).get_original_weight()


class Alone:
    """transformers and PEFT in one process, one document at a time."""

    def __init__(self, place: Path, kind: str, method: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.samples = samples(place)
        self.model: Any = AutoModelForCausalLM.from_pretrained(place / kind)
        if method == "qlora":
            round_to_nf4(self.model)
        if method != "full":
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            self.model = get_peft_model(self.model, settings)
            for name, one in self.model.named_parameters():
                if "lora_A" in name:
                    fill(one, SEED, name, (3.0 * one.shape[1]) ** -0.5)
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, RATE, (0.9, 0.95), weight_decay=0.0)

    def train(self) -> Numbers:
        import torch

        numbers = []
        for step in range(STEPS):
            positions = range(step * BATCH, (step + 1) * BATCH)
            ids = sample_ids(positions, len(self.samples), SEED)
            batch = [document for one in ids for document in self.samples[one]]
            count = sum(trained for document in batch for _, trained in document[1:])
            losses = [self.loss(document) / count for document in batch]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            numbers.append((float(sum(losses)), float(norm)))
        return numbers

    def loss(self, document: list[tuple[int, bool]]) -> Any:
        """The sum over what has a loss."""
        import torch

        tokens = torch.tensor([[number for number, _ in document]])
        labels = torch.tensor([number if trained else -100 for number, trained in document[1:]])
        logits = self.model(input_ids=tokens).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def logits(self, model: Any) -> Any:
        import torch

        tokens = torch.tensor([[number for number, _ in self.samples[0][0]]])
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[tuple[str, str], tuple[Alone, Numbers]]:
    made = {case: Alone(place, *case) for case in CASES}
    return {case: (one, one.train()) for case, one in made.items()}


@pytest.mark.parametrize("ranks", RANKS)
def test_losses_and_exports_are_those_of_transformers_and_peft(
    ranks: str, place: Path, tmp_path: Path, alone: dict[tuple[str, str], tuple[Alone, Numbers]]
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    count, mesh = RANKS[ranks]
    cases = [case for case in CASES if case[1] != "qlora" or "tensor" not in mesh]
    jobs = [document(f"{kind}-{method}", place, kind, count, mesh, method=method)
            for kind, method in cases]  # fmt: skip
    more: dict[str, Any] = {"method": "lora", "merge": True}
    more |= {} if "tensor" in mesh else {"microBatch": 1}  # two orders of sums
    jobs.append(document("merged", place, "qwen3", count, mesh, **more))
    found = several(tmp_path, jobs, count)
    for case in cases:
        name, (one, expected) = "-".join(case), alone[case]
        compare(name, found[name], expected, DIGITS)
        model = AutoModelForCausalLM.from_pretrained(
            place / (name if case[1] == "full" else case[0])
        )
        if case[1] == "qlora":
            round_to_nf4(model)
        if case[1] != "full":
            model = PeftModel.from_pretrained(model, place / name)
        assert torch.allclose(one.logits(model), one.logits(one.model), atol=2e-3), name
    one, expected = alone["qwen3", "lora"]
    compare("merged", found["merged"], expected, DIGITS)
    model = AutoModelForCausalLM.from_pretrained(place / "merged")
    assert torch.allclose(one.logits(model), one.logits(one.model), atol=2e-3)


def test_faults_change_no_loss(place: Path, tmp_path: Path) -> None:
    """A worker and a node are lost within an epoch: each sample once."""
    more = {"steps": None, "epochs": 3, "method": "lora", "minStepSeconds": 0.3}
    calm = document("calm", place, "qwen3", 1, {"shard": 1}, **more)
    calm["spec"]["entrypoint"]["recipe"]["config"]["minStepSeconds"] = 0
    expected = several(tmp_path, [calm], 1)["calm"]
    job = document("shaken", place, "qwen3", 1, {"shard": "world"}, **more)
    job["spec"] |= {"nodes": {"min": 1, "max": 2}}
    job["spec"]["checkpoint"] = {"memory": {"everySteps": 1}}
    one = Job(tmp_path, job)
    try:
        one.run()
        lose_a_worker_and_a_node(one)
        losses = losses_of(one)
    finally:
        one.end()
    assert [*losses] == [*range(len(expected))]
    assert [*losses.values()] == pytest.approx([loss for loss, _ in expected], rel=DIGITS)


def test_resizes_and_a_kill_in_a_save_change_no_loss(place: Path, tmp_path: Path) -> None:
    """The job shrinks and grows in the middle of epochs: each sample once at any size."""
    more = {"steps": None, "epochs": 9, "method": "lora"}
    calm = document("still", place, "qwen3", 1, {"shard": 1}, **more)
    expected = several(tmp_path, [calm], 1)["still"]
    job = document("resized", place, "qwen3", 1, {"shard": "world"}, **more, minStepSeconds=0.4)
    job["spec"] |= {"nodes": {"min": 1, "max": 2}}
    job["spec"]["checkpoint"] = {"memory": {"everySteps": 1}, "storage": {"everySteps": 3}}
    one = Job(tmp_path, job)
    try:
        one.run()
        one.until(lambda view: view.step >= 4)
        assert one.request("resize", nodes=1).ok
        one.until(lambda view: view.world_size == 1 and view.step >= 10)
        assert one.request("resize", nodes=2).ok
        view = one.until(lambda view: view.world_size == 2 and view.step >= 12)
        one.until(lambda now: now.commits > view.commits)
        one.kill(one.worker_pids()[1])
        assert one.wait().state == "succeeded", one.output()
        losses = losses_of(one)
    finally:
        one.end()
    assert [*losses] == [*range(len(expected))]
    assert [*losses.values()] == pytest.approx([loss for loss, _ in expected], rel=DIGITS)


def test_kills_change_no_bit_of_an_adapter(place: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    more = {"steps": 12, "method": "lora"}
    several(tmp_path, [document("calm-bits", place, "qwen3", 2, {"shard": 2}, **more)], 2)
    job = document("shaken-bits", place, "qwen3", 2, {"shard": 2}, **more, minStepSeconds=0.4)
    job["spec"]["checkpoint"] = {"memory": {"everySteps": 1}}
    one = Job(tmp_path, job)
    try:
        one.run()
        for number, rank in enumerate((1, 0)):
            one.until(lambda view, least=3 + 4 * number: view.step >= least)
            one.kill(one.worker_pids()[rank])
            one.running(incidents=number + 1)
        assert one.wait().state == "succeeded", one.output()
    finally:
        one.end()
    calm, shaken = (
        load_file(place / name / "adapter_model.safetensors")
        for name in ("calm-bits", "shaken-bits")
    )
    assert calm.keys() == shaken.keys()
    assert all(torch.equal(calm[name], shaken[name]) for name in calm)


def changed(model: Path, copy: Path, **settings: Any) -> Path:
    """A copy of a model's directory with other settings in config.json."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **settings}))
    return copy


def test_models_that_do_not_fit_are_rejected(place: Path, tmp_path: Path) -> None:
    import torch

    from holdfast.workers.training import pretrained

    def load(directory: Path) -> None:
        model = pretrained.build(directory, torch.float32)
        model._apply(lambda one: torch.empty_like(one, device="cpu") if one.is_meta else one)
        pretrained.load(dict(model.named_parameters()), directory)

    qwen = place / "qwen2"
    with pytest.raises(UserError, match=r"got the architecture qwen22; .*near ones are .*qwen2"):
        load(changed(qwen, tmp_path / "other", model_type="qwen22"))
    with pytest.raises(UserError, match=r"that transformers rejects \((.|\n)*must be equal to"):
        load(changed(qwen, tmp_path / "deep", num_hidden_layers=3))
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    with pytest.raises(UserError, match=r"got no model.layers.2\.\S+ in .*; download the dire"):
        load(changed(qwen, tmp_path / "deeper", **layers))
    with pytest.raises(UserError, match=r"got the shape \(272, 64\) of .*\(280, 64\), as con"):
        load(changed(qwen, tmp_path / "larger", vocab_size=280))
    (tmp_path / "larger/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"larger without tokenizer.json; expected the token"):
        pretrained.tokenizer_of(tmp_path / "larger")
    model = pretrained.build(qwen, torch.float32)
    with pytest.raises(UserError, match=r"tensor: got 4; expected a divisor of num_key_value_he"):
        pretrained.plan_of(model.config, 4)
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "another"}
    with pytest.raises(UserError, match=r"tensor: got 2 with the architecture qwen2, for which"):
        pretrained.plan_of(model.config, 2)
    for target in ("q_prj", "embed_tokens", "self_attn"):
        config = Finetune.model_validate(FILES | {"adapter": {"targets": [target]}})
        with pytest.raises(UserError, match=f"got {target}; the model has .*o_proj, q_proj"):
            with_adapters(model, config)
    tied = pretrained.build(place / "qwen3", torch.float32)
    with pytest.raises(UserError, match=r"got lm_head; the model has no such linear layer"):
        with_adapters(tied, Finetune.model_validate(FILES | {"adapter": {"targets": ["lm_head"]}}))
    with pytest.raises(UserError, match=r"are quantized \(fp8\); expected float32"):
        load(changed(qwen, tmp_path / "fp8", quantization_config={"quant_method": "fp8"}))
    cut = changed(qwen, tmp_path / "cut")
    (shard := next(cut.glob("*.safetensors"))).write_bytes(b"version https://git-lfs")
    with pytest.raises(UserError, match=rf"got \S+{shard.name}, which is cut or another file \("):
        load(cut)
    (cut / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"got \S+; expected a JSON object"):
        pretrained._read_json(cut / "config.json")
    frozen = model.requires_grad_(False)
    with pytest.raises(UserError, match=r"got qlora with a matrix of 64 x 64 over 2 ranks; expec"):
        pretrained.expect_whole_groups(pretrained.blocks_of(frozen), Mesh(1, 2))


def test_documents_of_one_sample_do_not_see_each_other(tmp_path: Path) -> None:
    """Each architecture that is accepted, beside the same documents one by one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.workers.training import pretrained

    for kind in pretrained.TRIED:
        torch.manual_seed(2)
        config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {})})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        documents = [torch.randint(2, 272, (1, length)) for length in (9, 30, 5)]
        positions = torch.cat([torch.arange(one.shape[1]) for one in documents])[None]
        with torch.no_grad():
            packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
            alone = torch.cat([model(one, use_cache=False).logits for one in documents], 1)
        assert torch.allclose(packed, alone, atol=1e-5), kind


@pytest.mark.parametrize("output", [".", "..", "m", "m/tuned", "notes", "d"])
def test_an_output_replaces_nothing_but_an_earlier_result(output: str, tmp_path: Path) -> None:
    for name in ("m", "notes", "result"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes/thesis.txt").touch()
    (tmp_path / "d").touch()
    config = Finetune.model_construct(**FILES | {"output": output, "validation": None})
    with pytest.raises(UserError, match=r"config\.output: got .*expected a (directory|new)"):
        expect_free(config, str(tmp_path))
    (tmp_path / "result" / MARKER).touch()
    for free in ("result", "new", str(tmp_path / "far" / "away")):
        expect_free(Finetune.model_validate(FILES | {"output": free}), str(tmp_path))


def test_a_chunk_of_logits_at_a_time_changes_no_loss(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from holdfast.workers.training.recipes import finetune

    monkeypatch.setattr(finetune, "LOGITS", 272 * 5)
    tokens = torch.arange(2 * 12).view(2, 12)
    for scaling in (1.0, 4.0):
        model = AutoModelForCausalLM.from_pretrained(place / "qwen2")
        model.config.logits_scaling = scaling
        wanted = torch.nn.functional.cross_entropy(
            (model(tokens).logits / scaling).flatten(0, 1), tokens.flatten(), reduction="none"
        )
        wanted.sum().backward()
        gradients = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        finetune.give_losses(model)
        model.lm_head.targets_bt = tokens
        losses = model(tokens).logits / scaling  # as granite divides
        assert losses.shape == tokens.shape
        assert torch.allclose(losses.flatten(), wanted, atol=1e-5)
        losses.sum().backward()
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.allclose(one.grad, gradient, atol=1e-4)


def test_an_export_without_room_names_the_directory(place: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a small file system")
    job = document("full", place, "llama", 1, {}, steps=1, output=str(small / "out"))
    try:
        with pytest.raises(AssertionError):
            several(tmp_path, [job], 1)
        said = (tmp_path / "rank-0.log").read_text()
        assert re.search(r"config\.output: got \S+/out, which cannot be written \(.*space", said)
        assert not (small / "out").exists()
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)
