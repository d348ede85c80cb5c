"""Models of a directory as transformers writes it: build, find blocks, read values, write."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, empty
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint.param_names import plain_name
from holdfast.workers.session import Session

from .documents import CONFIG
from .parallel.tensor import copied

FIELD = f"{CONFIG}.model"
INDEX = "model.safetensors.index.json"
TRIED = ("granite", "llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Architectures whose packed documents do not see each other, by a test. Others of transformers
ignore positions that begin again, have convolutions, or store their weights by other names."""


def _read_json(path: Path) -> Any:
    """Raises UserError for a file that is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{FIELD}: got {path} ({error}); expected JSON; download it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{FIELD}: got {path}; expected a JSON object; download it again")
    return value


def expect_weights(directory: Path) -> None:
    """Raises UserError for a directory that has not all files of a model."""
    expected = "expected a directory as save_pretrained of transformers writes it"
    if not (directory / "config.json").is_file():
        raise UserError(f"{FIELD}: got {directory}, which has no config.json; {expected}")
    index = directory / INDEX
    if index.is_file():
        needed = {*_read_json(index).get("weight_map", {}).values()} or {"model.safetensors"}
    else:
        needed = {path.name for path in directory.glob("*.safetensors")} or {"model.safetensors"}
    fix = "download it again"
    if missing := sorted(name for name in needed if not (directory / name).is_file()):
        if [*directory.glob("*.bin")]:
            fix = "convert the .bin files: load the model and call save_pretrained"
        raise UserError(f"{FIELD}: got {directory} without {', '.join(missing)}; {expected}; {fix}")
    for name in sorted(needed):
        try:
            with safe_open(directory / name, "pt"):
                pass
        except SafetensorError as error:
            got = f"{directory / name}, which is cut or another file ({error})"
            raise UserError(f"{FIELD}: got {got}; expected safetensors; {fix}") from None


def build(directory: Path, dtype: torch.dtype) -> Any:
    """The model without values. Raises UserError for what transformers cannot build."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    expect_weights(directory)
    written = _read_json(directory / "config.json")
    kind = str(written.get("model_type", ""))
    if kind not in TRIED:
        near = ", ".join(difflib.get_close_matches(kind, TRIED))
        raise UserError(
            f"{FIELD}: got the architecture {kind or 'without a model_type'}; expected one of "
            f"{', '.join(TRIED)}, which are tried with packed documents"
            + (f"; near ones are {near}" if near else "")
        )
    if quantized := written.get("quantization_config"):
        raise UserError(
            f"{FIELD}: got {directory}, whose weights are quantized "
            f"({dict(quantized).get('quant_method', 'unknown')}); expected float32, bfloat16 or "
            "float16; use the directory that it was made from, with method qlora if memory is short"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
    except Exception as error:  # each model has checks of its own
        why = f"{FIELD}: got a config.json of {directory} that transformers rejects ({error})"
        raise UserError(f"{why}; expected a valid one; download it again") from None
    model.tie_weights()
    kept = model.state_dict().keys() - {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    if kept:
        raise UserError(
            f"{FIELD}: got a model with buffers ({', '.join(sorted(kept))}); expected parameters "
            "alone, as only they are read and written"
        )
    model.config.dtype = config.dtype or dtype  # of the directory, also of what is written
    return model


def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():  # transformers makes one without tokens
        raise UserError(
            f"{FIELD}: got {directory} without tokenizer.json; expected the tokenizer of the "
            "model; copy it from where the model was published"
        )
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks as transformers names them; otherwise the longest list of modules."""
    names = getattr(model, "_no_split_modules", None) or ()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [module for module in lists if len(module) and type(module[0]).__name__ in names]
    chosen = max(named or lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    return list(chosen)


def stored_name(name: str) -> str:
    """The name in the model's directory, of a parameter or layer beside adapters."""
    return plain_name(name).removeprefix("base_model.model.").replace(".base_layer", "")


class _Same(ParallelStyle):
    """All ranks of the axis have the whole module, and compute the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = partial(DTensor.from_local, placements=[Replicate()], run_check=False)
        enter: Any = lambda _, inputs, mesh: tuple(whole(part, mesh) for part in inputs)  # noqa: E731
        return distribute_module(module, device_mesh, None, enter, lambda _, y, __: y.to_local())


STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    # Each rank normalises its own heads (B, T, H, E), by weights that all ranks share.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Names in the plans of transformers."""


def plan_of(config: Any, tensor: int) -> dict[str, str]:
    """Styles of the layers by name, as transformers divides them. Raises UserError for a model that
    cannot be divided."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or {*plan.values()} - {*STYLES}:
        raise UserError(
            f"spec.parallelism.tensor: got {tensor} with the architecture {config.model_type}, for "
            "which transformers has no plan that can be used; expected 1; use shard"
        )
    sides = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
    for name in sides:
        if getattr(config, name) % tensor:
            raise UserError(
                f"spec.parallelism.tensor: got {tensor}; expected a divisor of {name} in "
                f"config.json ({getattr(config, name)}); use a divisor, or shard"
            )
    return {f"model.{name}": style for name, style in plan.items()}


def divide(model: Any, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Divide the parameters over a tensor axis. An adapter's matrices follow their layer; embedding
    and head are divided by vocabulary, the logits come divided."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for name, module in [*model.named_modules()]:
        if not [*module.parameters(recurse=False)]:
            continue
        layer, _, adapter = stored_name(name).partition(".lora_")
        style = plan.get(re.sub(r"\.\d+\.", ".*.", layer), "")
        chosen = STYLES.get(style, _Same())
        if layer == "lm_head":
            style, chosen = "colwise", logits
        if adapter and not style.startswith("row" if adapter.startswith("A") else "col"):
            chosen = _Same()
        if module is embedding:
            chosen = RowwiseParallel(input_layouts=Replicate())
            module.register_forward_hook(copied)
        parallelize_module(module, mesh, chosen)
    if tied:
        head.weight = embedding.weight


def load(parameters: Mapping[str, Tensor], directory: Path) -> None:
    """Fill parameters, by stored name, each rank its own part. Raises UserError for values that the
    directory lacks."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as fill_from

    reader = HuggingFaceStorageReader(str(directory))
    stored = reader.read_metadata().state_dict_metadata
    for name, parameter in parameters.items():
        shape = tuple(getattr(stored.get(name), "size", ()))
        if shape != tuple(parameter.shape):
            got = f"the shape {shape} of {name}" if shape else f"no {name} in {directory}"
            raise UserError(
                f"{FIELD}: got {got}; expected {tuple(parameter.shape)}, as config.json says; "
                "download the directory again"
            )
    tensors: dict[str, Any] = {name: tensor.detach() for name, tensor in parameters.items()}
    with torch.no_grad():
        fill_from(tensors, storage_reader=reader, no_dist=True)


GROUP = 64 * 256
"""Values that NF4 with double quantization keeps together: a shard is a multiple of them."""


def quantize(model: nn.Module, directory: Path, session: Session, block: nn.Module) -> None:
    """Give the frozen matrices of a block their values in NF4. Each rank reads its part of them;
    scales need the whole matrix."""
    from torchao.quantization import NF4Tensor

    inside = {id(module) for module in block.modules()}
    linear = {
        stored_name(f"{name}.weight"): module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear) and ".lora_" not in name
    }
    values = {name: _empty(module.weight, session) for name, module in linear.items()}
    load(values, directory)
    for name, layer in linear.items():
        weight = NF4Tensor.from_tensor(gathered(values.pop(name)), 64, 256)
        layer.weight = nn.Parameter(weight, requires_grad=False)


def _empty(like: Tensor, session: Session) -> Tensor:
    """A matrix without values, divided over the ranks that shard it."""
    if session.shape.num_fsdp_shards == 1:
        return torch.empty_like(like, device=session.device)
    mesh = session.fsdp_mesh
    places = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return empty(*like.shape, dtype=like.dtype, device_mesh=mesh, placements=places)


def is_quantized(parameter: Tensor) -> bool:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return type(local).__name__ == "NF4Tensor"


def expect_whole_groups(blocks: list[nn.Module], shape: Mesh) -> None:
    """Raises UserError for matrices whose shards are not whole groups of NF4."""
    shards = shape.num_fsdp_shards
    for module in (part for block in blocks for part in block.modules()):
        if not isinstance(module, nn.Linear) or module.weight.requires_grad:
            continue
        rows, columns = module.weight.shape
        if rows % shards or rows // shards * columns % GROUP:
            raise UserError(
                f"{CONFIG}.method: got qlora with a matrix of {rows} x {columns} over {shards} "
                f"ranks; expected a multiple of {GROUP} values on each, which NF4 keeps together; "
                "use fewer shards (parallelism.shard), or lora"
            )


SHARD_BYTES = 5 * 10**9


def write(values: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Write values as they come, in files of at most SHARD_BYTES, or of one tensor that is larger.
    Memory has those of a file, and the next value."""
    part: dict[str, Tensor] = {}
    files: list[list[str]] = []
    total = room = 0

    def finish() -> None:
        save_file(part, directory / f"{len(files)}.part", {"format": "pt"})
        files.append([*part])
        part.clear()

    directory.mkdir(parents=True)
    for name, value in values:
        if part and value.nbytes > room:
            finish()
        room = (room if part else SHARD_BYTES) - value.nbytes
        part[name], total = value.contiguous(), total + value.nbytes
    finish()
    weight_map = {}
    for number, names in enumerate(files):
        place = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        place = place if len(files) > 1 else "model.safetensors"
        (directory / f"{number}.part").rename(directory / place)
        weight_map.update(dict.fromkeys(names, place))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def gathered(tensor: Tensor) -> Tensor:
    """All values of a parameter; each rank takes part."""
    full = tensor.detach()
    return full.full_tensor() if isinstance(full, DTensor) else full
