"""Models of a directory as transformers writes it: build, find blocks, read values, write."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint.state import plain_name

from .documents import CONFIG

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
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    named = [one for one in lists if len(one) and type(one[0]).__name__ in names]
    chosen = max(named or lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    return list(chosen)


def stored_name(name: str) -> str:
    """The name in the model's directory, of a parameter beside adapters."""
    plain = plain_name(name).removeprefix("base_model.model.")
    return plain.replace(".base_layer.", ".")


def load(parameters: dict[str, nn.Parameter], directory: Path) -> None:
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
    tensors: dict[str, Any] = {name: one.detach() for name, one in parameters.items()}
    with torch.no_grad():
        fill_from(tensors, storage_reader=reader, no_dist=True)


GROUP = 64 * 256
"""Values that NF4 with double quantization keeps together: a shard is a multiple of them."""


def quantize(model: nn.Module, directory: Path, device: torch.device, block: nn.Module) -> None:
    """Give the frozen matrices of a block their values in NF4."""
    from torchao.quantization import NF4Tensor

    inside = {id(one) for one in block.modules()}
    linear = {
        stored_name(f"{name}.weight"): one
        for name, one in model.named_modules()
        if id(one) in inside and isinstance(one, nn.Linear) and ".lora_" not in name
    }
    values = {
        name: nn.Parameter(torch.empty_like(one.weight, device=device), requires_grad=False)
        for name, one in linear.items()
    }
    load(values, directory)
    for name, one in linear.items():
        weight = NF4Tensor.from_tensor(values.pop(name).data, 64, 256)
        one.weight = nn.Parameter(weight, requires_grad=False)


def is_quantized(parameter: Tensor) -> bool:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return type(local).__name__ == "NF4Tensor"


def expect_whole_groups(blocks: list[nn.Module], shape: Mesh) -> None:
    """Raises UserError for matrices whose shards are not whole groups of NF4."""
    shards = shape.num_fsdp_shards
    for module in (one for block in blocks for one in block.modules()):
        if not isinstance(module, nn.Linear) or module.weight.requires_grad:
            continue
        rows, columns = module.weight.shape
        if rows % shards or rows // shards * columns % GROUP:
            raise UserError(
                f"{CONFIG}.method: got qlora with a matrix of {rows} x {columns} over {shards} "
                f"ranks; expected a multiple of {GROUP} values on each, which NF4 keeps together; "
                "use fewer shards (parallelism.shard), or lora"
            )


def whole(tensor: Tensor) -> Tensor:
    """All values of a parameter, on the host; each rank takes part."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.cpu()
