"""Activations, logits, and what attention over a context axis gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..api.v1alpha1.parallelism import ActivationCheckpointing
from . import adapters
from .model import Architecture
from .terms import BACKWARD_BEGINS, BACKWARD_ENDS, FORWARD, LOSS, Term
from .workload import ParallelLayout, StageEnds, Workload

_SOURCE = "Korthikanti et al. 2022, section 4, counted for RMSNorm and SwiGLU"


def activation_terms(work: Workload, layout: ParallelLayout, part: StageEnds) -> Iterator[Term]:
    """Terms of one rank; in a pipeline, of a rank with `part`."""
    tokens, mesh = rank_tokens(work, layout), layout.mesh
    live = layer_bytes(work, layout) * tokens
    kept, what = _kept_of_layers(work, layout, tokens, live)
    flight = in_flight(layout, part) / mesh.pipeline
    flying = f"; x {flight:.2g} for the micro-batches in flight" if mesh.pipeline > 1 else ""

    def formula() -> str:
        return f"{what()}; {tokens:,} tokens of a micro-batch{flying}"

    until_backward = FORWARD | LOSS | BACKWARD_BEGINS
    yield Term("activations", "activations", flight * kept, until_backward, formula, _SOURCE)
    if layout.checkpointing.blocks:
        # Its kept results are among the activations already.
        again = (
            live / tokens - kept_bytes(layout.checkpointing, work.model, work.width) / mesh.tensor
        )
        yield Term(
            "activations", "one block computed again", again * tokens,
            BACKWARD_BEGINS | BACKWARD_ENDS,
            lambda: f"{again:,.0f} bytes x {tokens:,} tokens", _SOURCE,
        )  # fmt: skip
    # Backward of the feed-forward part holds gradients of 2.5 of its tensors at once, and with a
    # tensor axis a gathered gradient twice.
    width = 2.5 * work.model.ffn_dim * work.width / mesh.tensor
    if mesh.tensor > 1:
        width += 2 * work.width * work.model.dim
    yield Term(
        "activations", "gradients of activations", width * tokens, BACKWARD_BEGINS | BACKWARD_ENDS,
        lambda: f"{width:,.0f} bytes x {tokens:,} tokens", "torch autograd, by trace",
    )  # fmt: skip
    if part.head:
        yield from _edges(work, layout, tokens)
    if mesh.context > 1:
        yield _keys_of_others(work, layout, tokens)


def rank_tokens(work: Workload, layout: ParallelLayout) -> int:
    """Tokens of a micro-batch on one rank."""
    return layout.micro_batch * (work.sequence_length // layout.mesh.context)


def layer_bytes(work: Workload, layout: ParallelLayout) -> float:
    """Bytes that a block keeps for backward, per token, on one rank.

    Inputs of the two norms, their results, rotated queries and keys, values, the result of
    attention, and four tensors of the feed-forward part (without a gate two); in float32 a number
    for each row of a norm and for each head. A tensor axis divides all of these but the results of
    the norms, which are gathered.
    """
    model, width, tensor = work.model, work.width, layout.mesh.tensor
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = width * (2 * heads + 2 * keys + (2 + 2 * model.gated_ffn) * model.ffn_dim)
    inner += 4 * model.num_heads
    norms = 4 * width * model.dim + 8
    if model.qk_norm:
        inner += width * (heads + keys) + 4 * (model.num_heads + model.num_kv_heads)
    if not work.on_gpu:
        # The norms of CPUs keep what they computed in float32, and attention has keys and values
        # for each head.
        inner += 2 * width * (heads - keys)
        norms = (24 if width == 4 else 20) * model.dim
    inner += adapters.kept_per_token(work)
    if _autocast(work, layout):
        # autocast: the residual stream is in float32, and each matrix keeps its cast input.
        norms = (8 + 10) * model.dim + 8
    if tensor > 1:
        return 2 * width * model.dim + (inner + norms - 2 * width * model.dim) / tensor
    return inner + norms


def input_bytes(work: Workload, layout: ParallelLayout) -> float:
    """Bytes per token of a block's input, on one rank of a tensor axis."""
    width = 4 if _autocast(work, layout) else work.width
    return width * work.model.dim / layout.mesh.tensor


def _autocast(work: Workload, layout: ParallelLayout) -> bool:
    """True if autocast casts float32 parameters; frozen weights are in the format of forward."""
    return not layout.fsdp and work.width < 4 and work.method == "full"


def _kept_of_layers(
    work: Workload, layout: ParallelLayout, tokens: int, live: float
) -> tuple[float, Callable[[], str]]:
    model, settings = work.model, layout.checkpointing
    layers = model.num_layers
    each = live / tokens
    if settings.blocks:
        wrapped = layers // settings.blocks.every_nth_block
        bare = layers - wrapped
        per = (
            input_bytes(work, layout) + kept_bytes(settings, model, work.width) / layout.mesh.tensor
        )
        return tokens * (wrapped * per + bare * each), (
            lambda: f"{wrapped} blocks x {per:,.0f} bytes, {bare} x {each:,.0f}"
        )
    if settings.budget is not None:
        least = input_bytes(work, layout)
        per = least + settings.budget * (each - least)
        return tokens * layers * per, (lambda: f"{layers} blocks x {per:,.0f} bytes")
    return layers * live, (lambda: f"{layers} blocks x {each:,.0f} bytes")


def kept_bytes(settings: ActivationCheckpointing, model: Architecture, width: int) -> float:
    """Bytes that a block which is computed again keeps per token beside its input: the results of
    the kept operations."""
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    kept = {
        "matmul": heads + 2 * keys + 2 * model.dim + (1 + model.gated_ffn) * model.ffn_dim,
        "attention": heads,
    }
    return width * sum(kept[name] for name in set(settings.keep))


def _edges(work: Workload, layout: ParallelLayout, tokens: int) -> Iterator[Term]:
    """The last norm, the logits, and cross entropy in float32: forward has the logits, their
    float32 copy and their logarithms; backward the logarithms and two gradients, with logits that
    are divided over a tensor axis three. GPipe keeps the logarithms of all micro-batches."""
    vocabulary, tensor, width = work.model.vocab_size, layout.mesh.tensor, work.width
    source = "torch cross_entropy, by trace (bench/plan_accuracy)"
    whole = tensor > 1
    edges = width * work.model.dim * tokens * (1 / tensor + 1)
    yield Term(
        "activations", "input and result of the last norm", edges, FORWARD | LOSS,
        lambda: f"{width} D x {tokens:,} tokens, twice", _SOURCE,
    )  # fmt: skip
    chunk = layout.chunk_tokens
    rows = min(tokens, chunk) if chunk else tokens
    share = rows * vocabulary / tensor

    def formula(per: int) -> str:
        return f"{per} x {rows:,} tokens x V {vocabulary:,}{f' / {tensor}' if whole else ''}"

    if chunk:
        yield from _in_chunks(work, tokens, rows, tensor, formula)
    else:
        yield Term("logits", "logits", width * share, FORWARD, lambda: formula(width), source)
        per = 16 if whole else 12
        if layout.mesh.pipeline > 1 and layout.schedule == "gpipe":
            per += 4 * (layout.num_micro_batches - 1)
        yield Term("logits", "logits and their float32 gradients", per * share, LOSS,
                   lambda: formula(per), source)  # fmt: skip
    yield Term("logits", "gradient of the logits", width * share, BACKWARD_BEGINS,
               lambda: formula(width), source)  # fmt: skip


def _in_chunks(
    work: Workload, tokens: int, rows: int, tensor: int, formula: Callable[[int], str]
) -> Iterator[Term]:
    """A chunk's logits and their logarithms, in forward and again in backward of the head, which
    the loss is part of: there with the sum of the head's gradient, and that of the chunk."""
    model, width, source = work.model, work.width, "torch.utils.checkpoint, by trace"
    vocabulary, sums = model.vocab_size / tensor, 2 if tokens > rows else 1
    yield Term("logits", "logits of a chunk", 8 * rows * vocabulary, FORWARD | LOSS,
               lambda: formula(8), source)  # fmt: skip
    yield Term(
        "logits", "the head's gradient, summed over the chunks",
        sums * width * model.dim * vocabulary, LOSS, lambda: f"{sums} x {width} D V", source,
    )  # fmt: skip
    yield Term(
        "activations", "gradient of the head's input", width * model.dim * tokens, LOSS,
        lambda: f"{width} D x {tokens:,} tokens", source,
    )  # fmt: skip


def _keys_of_others(work: Workload, layout: ParallelLayout, tokens: int) -> Term:
    """Forward gathers keys and values in place of a ring; backward passes on float32 gradients."""
    ranks, width = layout.mesh.context, work.width
    each = key_value_dim(work.model, layout)
    size = (width * ranks + 2 * 4) * tokens * each
    return Term(
        "activations", "keys and values of the others", size,
        FORWARD | LOSS | BACKWARD_BEGINS | BACKWARD_ENDS,
        lambda: f"({width} C + 8) x {tokens:,} tokens x {each:,}; C {ranks}",
        "torch's _templated_ring_attention, rotation by all-gather",
    )  # fmt: skip


def key_value_dim(model: Architecture, layout: ParallelLayout) -> int:
    """Numbers of a token's keys and values in one layer, on one rank of the tensor axis."""
    return 2 * model.num_kv_heads * model.head_dim // layout.mesh.tensor


def in_flight(layout: ParallelLayout, part: StageEnds) -> float:
    """Micro-batches whose activations a rank of a pipeline of p keeps, with v stages on each, for
    all layers of the rank. gpipe: all; 1F1B: p on the first rank, 1 on the last; interleaved:
    (2 (p - 1) + (v - 1) p + 1) / v on the first, without the 2 (p - 1) on the last; a V: p on all.
    Sources: Narayanan et al. 2021; Korthikanti et al. 2022, section 4.2.3; Qi et al. 2024."""
    p, v, batches = layout.mesh.pipeline, layout.stages_per_rank, layout.num_micro_batches
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(batches)
    if layout.schedule == "zbvZeroBubble":
        return float(min(p, batches))
    first = 2 * (p - 1) if not part.head else 0
    if v == 1:
        return float(min(p if not part.head else 1, batches))
    return min((first + (v - 1) * p + 1) / v, float(batches))
