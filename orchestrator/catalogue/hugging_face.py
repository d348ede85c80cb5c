"""The architecture in a Hugging Face config.json, of the types that can be counted exactly.

Source: the modelling code of transformers 4.57 for each type, with its default where a field may be
left out. Everything else is rejected by name: an approximate count would make an approximate plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import Problem
from ..planner.model import Architecture
from .load import CatalogueError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
"""Fields that only a mixture of experts has."""
ELSEWHERE = "describe the model in a catalogue file, or plan one of the types that can be counted"
POSITIVE = "a whole number above zero"


class Keys(NamedTuple):
    """Names of the sizes in one type's config.json. Empty: the type has no such field."""

    dim: str = "hidden_size"
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    ffn_dim: str = "intermediate_size"
    max_sequence_length: str = "max_position_embeddings"


class ModelType(NamedTuple):
    """Properties that follow from a `model_type`."""

    keys: Keys
    tied: bool
    """Default of tie_word_embeddings."""
    fixed: dict[str, Any]
    """Fields of Architecture that every model of the type has."""
    biases: Callable[[_Reader], dict[str, bool]] | None = None
    """Reads the biases, where the configuration decides about them."""


class _Reader:
    """Reads fields of one configuration and collects the problems."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.problems: list[Problem] = []

    def positive(self, key: str, default: int | None = None) -> int:
        """A size. A field that is left out or null has the default; without one it is a problem."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        got = "no such field" if key not in self._config else repr(value)
        self.problems.append(Problem(key, got, POSITIVE, "use the complete config.json"))
        return 1

    def has(self, key: str) -> bool:
        return key in self._config

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(Problem(key, repr(value), "true or false"))
        return bool(value)

    def refuse(self, field: str, got: str, expected: str) -> None:
        self.problems.append(Problem(field, got, expected, ELSEWHERE))


def _llama_biases(reader: _Reader) -> dict[str, bool]:
    """attention_bias gives all four matrices of the attention a bias, mlp_bias all three of the
    feed-forward part."""
    attention, ffn = reader.flag("attention_bias", False), reader.flag("mlp_bias", False)
    if attention != ffn:
        got = f"{attention} with mlp_bias {ffn}"
        reader.refuse("attention_bias", got.lower(), "both true or both false")
    return {"qkv_bias": attention, "biases": attention}


def _no_biases(reader: _Reader) -> dict[str, bool]:
    if reader.flag("attention_bias", False):
        reader.refuse("attention_bias", "true", "false for this model_type")
    return {}


def _gpt2_biases(reader: _Reader) -> dict[str, bool]:
    if reader.flag("add_cross_attention", False):
        reader.refuse("add_cross_attention", "true", "false: a decoder only")
    return {"qkv_bias": True, "biases": True}


def _neox_biases(reader: _Reader) -> dict[str, bool]:
    if not reader.flag("attention_bias", True):
        reader.refuse("attention_bias", "false", "true for this model_type")
    return {"qkv_bias": True, "biases": True}


_HEADS_ALONE = Keys(num_kv_heads="", head_dim="")
_GPT2 = Keys("n_embd", "n_layer", "n_head", "", "", "n_inner", "n_positions")
_GPT = {"gated_ffn": False, "layer_norm": True}
TYPES = {
    "llama": ModelType(Keys(), False, {}, _llama_biases),
    "mistral": ModelType(Keys(), False, {}),
    "qwen2": ModelType(Keys(head_dim=""), False, {"qkv_bias": True}),
    "qwen3": ModelType(Keys(), False, {"qk_norm": True}, _no_biases),
    "gemma": ModelType(Keys(), True, {}, _no_biases),
    "gpt2": ModelType(_GPT2, True, _GPT, _gpt2_biases),
    "gpt_neox": ModelType(_HEADS_ALONE, False, _GPT, _neox_biases),
}
DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma": 256}
"""Head size of types whose heads do not simply share hidden_size."""


def architecture_of(config: object, name: str) -> Architecture:
    """The architecture of a model's config.json. `name`: for the result and for messages, such as
    the path. Raises CatalogueError with all problems: a type that cannot be counted exactly, a
    mixture of experts, missing fields, sizes that do not fit each other."""
    if not isinstance(config, Mapping):
        got = f"a {type(config).__name__}"
        raise CatalogueError([Problem("config.json", got, "an object with fields")], name)
    if config.get("quantization_config"):
        raise CatalogueError([_quantized(config["quantization_config"])], name)
    kind = _type(config, name)
    reader = _Reader(config)
    sizes = _sizes(reader, kind, str(config["model_type"]))
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        got = f"{sizes['num_kv_heads']} with {sizes['num_heads']} heads"
        field = kind.keys.num_kv_heads or kind.keys.num_heads
        reader.problems.append(Problem(field, got, f"a divisor of {kind.keys.num_heads}"))
    sizes |= kind.fixed
    if kind.biases is not None:
        sizes |= kind.biases(reader)
    sizes["tied_embeddings"] = reader.flag("tie_word_embeddings", kind.tied)
    if reader.problems:
        raise CatalogueError(reader.problems, name)
    return Architecture(name=name, source=f"config.json of {name}", **sizes)


def _quantized(written: Any) -> Problem:
    """Weights of few bits are not trained; the original model has the same sizes."""
    kind = written.get("quant_method", "") if isinstance(written, Mapping) else ""
    got = f"quantized weights{f' ({kind})' if kind else ''}"
    fix = (
        "use the original model's config.json, or remove the field to plan training of all weights"
    )
    return Problem("quantization_config", got, "weights in bfloat16, float16 or float32", fix)


def _type(config: Mapping[str, Any], name: str) -> ModelType:
    written = config.get("model_type")
    types = ", ".join(TYPES)
    experts = [key for key in EXPERTS if config.get(key)]
    if experts or "moe" in str(written) or written == "mixtral":
        got = f"{written!r}, a mixture of experts" + (f" ({experts[0]})" if experts else "")
        problem = Problem("model_type", got, f"a dense model: {types}", ELSEWHERE)
        raise CatalogueError([problem], name)
    kind = TYPES.get(written) if isinstance(written, str) else None
    if kind is not None:
        return kind
    got = repr(written) if written is not None else "no such field"
    close = difflib.get_close_matches(str(written), TYPES, n=1)
    fix = ELSEWHERE + (f"; the nearest is {close[0]}" if close else "")
    raise CatalogueError([Problem("model_type", got, f"one of {types}", fix)], name)


def _sizes(reader: _Reader, kind: ModelType, model_type: str) -> dict[str, Any]:
    keys = kind.keys
    dim, heads = reader.positive(keys.dim), reader.positive(keys.num_heads)
    sizes: dict[str, Any] = {
        "vocab_size": reader.positive("vocab_size"),
        "dim": dim,
        "num_layers": reader.positive(keys.num_layers),
        "num_heads": heads,
        "num_kv_heads": _kv_heads(reader, kind, heads, model_type),
        "max_sequence_length": reader.positive(keys.max_sequence_length),
    }
    usual = DEFAULT_HEAD_DIM.get(model_type, dim // heads or 1)
    sizes["head_dim"] = reader.positive(keys.head_dim, usual) if keys.head_dim else usual
    if sizes["head_dim"] * heads != dim and sizes["head_dim"] == dim // heads:
        got = f"{heads} with {keys.dim} {dim}"
        reader.problems.append(Problem(keys.num_heads, got, f"a divisor of {keys.dim}"))
    if model_type == "gpt2":
        sizes["ffn_dim"] = reader.positive(keys.ffn_dim, 4 * dim)
        sizes["learned_positions"] = sizes["max_sequence_length"]
    else:
        sizes["ffn_dim"] = reader.positive(keys.ffn_dim)
    return sizes


def _kv_heads(reader: _Reader, kind: ModelType, heads: int, model_type: str) -> int:
    """The number of heads where the type has no such field or it is null. The default of a field
    that is left out is a fixed number for all types but llama, so it is taken as missing there."""
    key = kind.keys.num_kv_heads
    if not key:
        return heads
    return reader.positive(key, heads if reader.has(key) or model_type == "llama" else None)
