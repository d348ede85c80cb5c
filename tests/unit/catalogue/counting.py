"""Counts an architecture's parameters with torch's modules, without the planner's formulas."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from holdfast.orchestrator.planner.model import Architecture


def parameters(one: Architecture) -> int:
    """All blocks of a model are alike, so one block is built and counted num_layers times."""
    with torch.device("meta"):
        embedding = nn.Embedding(one.vocab_size, one.dim)
        outside: list[nn.Module] = [embedding, norm(one, one.dim)]
        if one.learned_positions:
            outside.append(nn.Embedding(one.learned_positions, one.dim))
        if not one.tied_embeddings:
            outside.append(nn.Linear(one.dim, one.vocab_size, bias=False))
        block = list(modules_of_a_block(one))
    return count(outside) + one.num_layers * count(block)


def count(modules: list[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def norm(one: Architecture, width: int) -> nn.Module:
    return nn.LayerNorm(width) if one.layer_norm else nn.RMSNorm(width)


def modules_of_a_block(one: Architecture) -> Iterator[nn.Module]:
    yield norm(one, one.dim)
    yield nn.Linear(one.dim, one.num_heads * one.head_dim, bias=one.qkv_bias)
    for _ in range(2):
        yield nn.Linear(one.dim, one.num_kv_heads * one.head_dim, bias=one.qkv_bias)
    if one.qk_norm:
        yield norm(one, one.head_dim)
        yield norm(one, one.head_dim)
    yield nn.Linear(one.num_heads * one.head_dim, one.dim, bias=one.biases)
    yield norm(one, one.dim)
    for _ in range(1 + one.gated_ffn):
        yield nn.Linear(one.dim, one.ffn_dim, bias=one.biases)
    yield nn.Linear(one.ffn_dim, one.dim, bias=one.biases)
