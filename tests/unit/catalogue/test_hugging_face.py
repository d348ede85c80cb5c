"""Architectures of Hugging Face configurations. The counts are those of the models that
transformers 4.57.6 builds from the same configurations on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.catalogue.hugging_face import architecture_of
from holdfast.orchestrator.catalogue.load import CatalogueError, load_catalogue

from .counting import parameters

BASE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
}
BIASED = {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
COUNTS: list[tuple[dict[str, Any], int]] = [
    (BASE | {"model_type": "mistral"}, 7_241_732_096),
    (BASE | {"model_type": "llama"}, 7_241_732_096),
    (GPT2, 124_439_808),
    (NEOX, 70_426_624),
    (SMALL | {"model_type": "qwen2"}, 257_856),
    (SMALL | {"model_type": "qwen3"}, 516_288),
    (SMALL | {"model_type": "qwen3", "head_dim": 32}, 294_528),
    (SMALL | {"model_type": "gemma"}, 746_432),
    (SMALL | {"model_type": "gemma", "tie_word_embeddings": False, "head_dim": 16}, 257_472),
    (SMALL | BIASED | {"tie_word_embeddings": True}, 195_200),
]


@pytest.mark.parametrize(("config", "count"), COUNTS)
def test_a_configuration_has_the_parameters_of_its_model(
    config: dict[str, Any], count: int
) -> None:
    assert parameters(architecture_of(config, "mine")) == count


@pytest.mark.parametrize("name", ["llama3-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-32b", "mistral-7b"])
def test_a_published_configuration_gives_the_entry_of_the_catalogue(name: str) -> None:
    entry = load_catalogue().architecture(name)
    config = {
        "model_type": name.rstrip("0123456789b").rstrip("-").replace("llama3", "llama")
        .replace("qwen2.5", "qwen2"),
        "vocab_size": entry.vocab_size,
        "hidden_size": entry.dim,
        "intermediate_size": entry.ffn_dim,
        "num_hidden_layers": entry.num_layers,
        "num_attention_heads": entry.num_heads,
        "num_key_value_heads": entry.num_kv_heads,
        "max_position_embeddings": entry.max_sequence_length,
        "tie_word_embeddings": False,
    }  # fmt: skip
    found = architecture_of(config, "mine")
    for field in entry.__struct_fields__:
        if field not in ("name", "aliases", "source"):
            assert getattr(found, field) == getattr(entry, field), field
    assert found.name == "mine" and "mine" in found.source


def refused(config: Any) -> str:
    with pytest.raises(CatalogueError) as raised:
        architecture_of(config, "model/config.json")
    assert raised.value.exit_code == 2
    message = str(raised.value)
    assert message.startswith("model/config.json: ")
    return message


LLAMA = SMALL | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type: got no such field; expected one of llama, mistral"),
        ({"model_type": "lama"}, "model_type: got 'lama'; expected one of"),
        ({"model_type": "lama"}, "the nearest is llama"),
        ({"model_type": "gemma2"}, "model_type: got 'gemma2'; expected one of"),
        ({"model_type": ["llama"]}, "model_type: got ['llama']; expected one of"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts (num_local"),
        ({"model_type": "qwen3_moe"}, "got 'qwen3_moe', a mixture of experts; expected a dense"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config: got quantized weights (gptq); expected weights in bfloat16",
        ),
        ({"num_experts": 8}, "got 'llama', a mixture of experts (num_experts)"),
        ({"hidden_size": None}, "hidden_size: got None; expected a whole number above zero"),
        ({"hidden_size": "64"}, "hidden_size: got '64'; expected a whole number above zero"),
        ({"hidden_size": True}, "hidden_size: got True; expected a whole number above zero"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0; expected a whole number above"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "got 3 with hidden_size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3 with 4 heads; expected a divisor"),
        ({"attention_bias": True}, "attention_bias: got true with mlp_bias false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'; expected true or false"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    assert words in refused(LLAMA | changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SMALL | {"model_type": "qwen3", "attention_bias": True}, "attention_bias: got true"),
        (NEOX | {"attention_bias": False}, "attention_bias: got false; expected true"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention: got true"),
        ([1], "config.json: got a list; expected an object with fields"),
        ({}, "model_type: got no such field"),
    ],
)
def test_what_one_type_cannot_have_is_refused(config: Any, words: str) -> None:
    assert words in refused(config)


def test_all_missing_fields_are_named_in_one_message() -> None:
    message = refused({"model_type": "mistral", "vocab_size": 100})
    for field in BASE:
        assert (f"{field}: got no such field" in message) is (field != "vocab_size"), field
    assert "6 problems" in message


def test_a_llama_without_kv_heads_has_as_many_as_heads() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert architecture_of(config, "mine").num_kv_heads == 4
