"""The numbers of the founding documents, computed by the planner.

Each function of FIGURES gives the numbers that the lines of tests/founding/lines name. Sizes are in
GB, powers of ten, as in the documents. Where a formula is not the planner's, its source stands
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.explorer.search import search
from holdfast.orchestrator.explorer.step_time import crosses_nodes, step_time
from holdfast.orchestrator.explorer.traffic import collectives
from holdfast.orchestrator.planner.activations import input_bytes, layer_bytes
from holdfast.orchestrator.planner.adapters import NF4_BYTES
from holdfast.orchestrator.planner.memory import USABLE, moment_bytes, state_bytes, state_terms
from holdfast.orchestrator.planner.model import count_parameters, of_recipe
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload
from holdfast.orchestrator.protocol.mesh import Mesh

from .claims import ceiling
from .models import (
    FULL,
    GB,
    LEAST,
    SEQUENCE,
    category_gb,
    cluster,
    device,
    hardware,
    kept_gb,
    layout,
    nominal,
    peak_gb,
    planned,
    states_gb,
    work,
)

Numbers = dict[str, Any]
FIGURES: dict[str, Callable[[], Numbers]] = {}
MIXED_BYTES = (2, 2, 12)
"""Bytes of ZeRO's mixed precision: parameters and gradients in 16 bits, float32 master copy and two
moments. Source: Rajbhandari et al. 2020, section 3.1."""
FLOAT32_BYTES = (4, 4, 8)
"""All in float32: FSDP2's, and those of document B."""
BUCKETS_MIB = (1, 5, 10, 25, 50, 100, 400)


def figure(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Registers a function under its name; its numbers are computed once."""
    kept = cache(function)
    FIGURES[function.__name__] = kept
    return kept


# -- states -------------------------------------------------------------------------------------
def zero_gb(billions: float, ranks: int, parts: tuple[int, int, int]) -> list[float]:
    """GB of one rank with DDP and ZeRO-1, 2 and 3, for (parameter, gradient, optimizer) bytes.
    Source: Rajbhandari et al. 2020, figure 1."""
    weights, gradients, states = parts
    per = [
        weights + gradients + states,
        weights + gradients + states / ranks,
        weights + (gradients + states) / ranks,
        (weights + gradients + states) / ranks,
    ]
    return [billions * one for one in per]


def zero_layouts(ranks: int) -> dict[str, ParallelLayout]:
    """Holdfast's spelling of each stage; ZeRO-1 and ZeRO-2 differ by the accumulation."""
    several: dict[str, Any] = {"num_micro_batches": 2}
    return {
        "DDP": layout(1, ranks),
        "ZeRO-1": layout(ranks, reshard=False, accumulate_whole=True, **several),
        "ZeRO-2": layout(ranks, reshard=False, **several),
        "ZeRO-3": layout(ranks, **several),
    }


@figure
def recipes() -> Numbers:
    one = nominal(70)
    return {
        "adamw": state_bytes(one),
        "adamw8bit": state_bytes(work("llama3-70b", optimizer="adamw8bit")),
        "moments8": moment_bytes(work("llama3-70b", optimizer="adamw8bit")),
        "muon": state_bytes(work("llama3-70b", optimizer="muon")),
        "twenty_13b": 20 * 13.0,
        "sixteen_13b": states_gb(nominal(13), 1),
    }


@figure
def model_states() -> Numbers:
    numbers: Numbers = {f"b{n}": states_gb(nominal(n), 1) for n in (1, 7, 13, 70, 175)}
    for key, name in (
        ("llama7", "llama2-7b"), ("llama8", "llama3-8b"), ("llama13", "llama2-13b"),
        ("llama70", "llama3-70b"), ("llama405", "llama3-405b"), ("gpt175", "gpt3-175b"),
    ):  # fmt: skip
        numbers[key] = states_gb(work(name), 1)
        numbers[f"{key}_billions"] = work(name).counts.total / GB
    return numbers


@figure
def itemised_70b() -> Numbers:
    terms = {term.category: term.num_bytes / GB for term in state_terms(nominal(70), layout(1))}
    document = {"weights": 2 * 70, "master": 4 * 70, "adam": 8 * 70, "gradients": 2 * 70}
    return {
        **{f"document_{name}": float(size) for name, size in document.items()},
        "document_total": sum(document.values()) + 50.0,
        **terms,
        "total": sum(terms.values()),
    }


@figure
def zero_8b_16() -> Numbers:
    ddp, one, two, three = zero_gb(8, 16, FLOAT32_BYTES)
    return {"ddp": ddp, "z1": one, "z2": two, "z3": three}


@figure
def zero_70b_8() -> Numbers:
    billions = work("llama3-70b").counts.total / GB
    ddp, one, two, three = zero_gb(billions, 8, MIXED_BYTES)
    layouts = zero_layouts(8)
    mine = {name: kept_gb(work("llama3-70b"), one) for name, one in layouts.items()}
    return {
        "ddp": ddp, "z1": one, "z2": two, "z3": three,
        "own1": mine["ZeRO-1"], "own2": mine["ZeRO-2"], "own3": mine["ZeRO-3"],
        "saved1": 1 - one / ddp, "saved2": 1 - two / ddp, "saved3": 1 - three / ddp,
        "pure3": 8 * billions / 8, "pure2": 2 * billions + 6 * billions / 8,
        "without_master3": three - 4 * billions / 8,
    }  # fmt: skip


@figure
def zero_factors() -> Numbers:
    numbers: Numbers = {}
    for ranks in (8, 16, 64, 1_000_000):
        ddp, one, two, three = zero_gb(1, ranks, MIXED_BYTES)
        name = "limit" if ranks == 1_000_000 else str(ranks)
        numbers |= {f"z1_{name}": ddp / one, f"z2_{name}": ddp / two, f"z3_{name}": ddp / three}
    return numbers


@figure
def sharded_states() -> Numbers:
    seventy, seven, eight = work("llama3-70b"), nominal(7), work("llama3-8b")
    return {
        "b7_8": states_gb(seven, 8),
        "llama8_8": states_gb(eight, 8),
        "llama8_1": states_gb(eight, 1),
        "drop_8_to_128": states_gb(eight, 8) - states_gb(eight, 128),
        "b70_2": states_gb(seventy, 2),
        "b70_8": states_gb(seventy, 8),
        "b70_32": states_gb(seventy, 32),
        "b70_64": states_gb(seventy, 64),
        "hsdp_8x8": states_gb(seventy, 8, 8),
        "hsdp_2x32": states_gb(seventy, 32, 2),
        "weights_70b": 2 * seventy.counts.total / GB,
        "b405_1024": states_gb(work("llama3-405b"), 1024),
        "b405": states_gb(work("llama3-405b"), 1) / 1000,
    }


@figure
def hybrid_70b_8x8() -> Numbers:
    """HYBRID_SHARD as documents C and D set it, with all that saves memory but offload."""
    have = device("H100-80").memory_bytes / GB
    one = work("llama3-70b")
    needs = peak_gb(one, layout(8, 8, **LEAST))
    fits = next(n for n in (8, 16, 32, 64) if peak_gb(one, layout(n, 64 // n, **LEAST)) <= have)
    safe = next(
        n for n in (8, 16, 32, 64) if peak_gb(one, layout(n, 64 // n, **LEAST)) <= USABLE * have
    )
    return {
        "states": states_gb(one, 8, 8), "needs": needs, "have": have, "fits": fits, "safe": safe,
        "needs_safe": peak_gb(one, layout(safe, 64 // safe, **LEAST)),
    }  # fmt: skip


@figure
def ddp_on_one_gpu() -> Numbers:
    have = device("A100-80").memory_bytes / GB
    return {
        "states7": states_gb(work("llama2-7b"), 1),
        "pure7": 8 * work("llama2-7b").counts.total / GB,
        "peak7": peak_gb(work("llama2-7b"), layout(1, 4, **LEAST)),
        "have80": have,
        "have40": device("A100-40").memory_bytes / GB,
    }


@figure
def adapters_70b() -> Numbers:
    total = work("llama3-70b").counts.total / GB
    eight = search(work("llama3-70b", batch=8, method="qlora"), cluster("8xH100-80")).ranked[0]
    return {
        "bf16": 2 * total,
        "nf4": NF4_BYTES * total,
        "lora_1": peak_gb(work("llama3-70b", method="lora"), layout(1, **LEAST)),
        "qlora_1": peak_gb(work("llama3-70b", method="qlora"), layout(1, **LEAST)),
        "qlora_8": peak_gb(work("llama3-70b", method="qlora"), layout(8, **LEAST)),
        "steps": eight.worth / (8 * SEQUENCE),
        "claimed": 50_000 / (5.6 * 3600 * 1.8),
        "lora_7b": peak_gb(work("llama2-7b", method="lora"), layout(1, **LEAST)),
        "qlora_7b": peak_gb(work("llama2-7b", method="qlora"), layout(1, **LEAST)),
        "have": device("H100-80").memory_bytes / GB,
        "full": states_gb(work("llama3-70b"), 1),
        "host_of_eight": 8 * 2 * total / 1000,
        "bf16_7b": 2 * work("llama2-7b").counts.total / GB,
        "have40": device("A100-40").memory_bytes / GB,
    }


@figure
def eight_bit_70b() -> Numbers:
    one = work("llama3-70b", optimizer="adamw8bit")
    return {
        "document": 140 + 280 + 140 + 140 + 14,
        "total": states_gb(one, 1),
        "moments": moment_bytes(one) * one.counts.total / GB,
        "adamw": 8 * one.counts.total / GB,
    }


# -- activations --------------------------------------------------------------------------------
@figure
def layer_8b() -> Numbers:
    """One sample of 2,048 tokens, as document B."""
    one, mesh = work("llama3-8b", 2048), layout(8)
    tensor = 2048 * input_bytes(one, mesh)
    return {
        "tensor_mb": tensor / 1e6,
        "inputs_gb": 32 * tensor / GB,
        "layer_mb": 2048 * layer_bytes(one, mesh) / 1e6,
        "all_gb": 32 * 2048 * layer_bytes(one, mesh) / GB,
    }


@figure
def checkpointing() -> Numbers:
    """Llama 3 8B over eight H100, one sample of 8,192 tokens a rank."""
    one, on, numbers = work("llama3-8b", 8192, 8), hardware("H100-80"), {}
    policies = {
        "none": layout(8),
        "full": layout(8, checkpointing=FULL),
        "nth": layout(8, checkpointing=type(FULL).model_validate({"full": {"everyNthBlock": 2}})),
        "selective": layout(8, checkpointing=type(FULL).model_validate({"selective": {}})),
    }
    plain = step_time(one, policies["none"], on).seconds
    for name, policy in policies.items():
        numbers[f"{name}_gb"] = category_gb(one, policy, "activations")
        numbers[f"{name}_more"] = step_time(one, policy, on).seconds / plain - 1
        numbers[f"{name}_saved"] = 1 - numbers[f"{name}_gb"] / numbers["none_gb"]
        numbers[f"{name}_times"] = numbers["none_gb"] / numbers[f"{name}_gb"]
    numbers["peak_none"] = peak_gb(one, policies["none"])
    numbers["states"] = states_gb(one, 8)
    return numbers


@figure
def activations_70b() -> Numbers:
    one = work("llama3-70b", 4096)
    none, full = layout(64), layout(64, checkpointing=FULL)
    return {
        "none": category_gb(one, none, "activations"),
        "full": category_gb(one, full, "activations"),
        "logits": category_gb(one, none, "logits"),
    }


@figure
def long_context() -> Numbers:
    """A sequence of 131,072 tokens of Llama 3 8B on 64 devices."""
    one = work("llama3-8b", 131_072, 64)
    apart = layout(8, context=8, **LEAST)
    return {
        "whole": peak_gb(one, layout(64, **LEAST)),
        "context8": peak_gb(one, apart),
        "have": device("H100-80").memory_bytes / GB,
    }


@figure
def one_gpu_8b() -> Numbers:
    plan = planned("llama3-8b", "8xH100-80", 8192, 512)
    assert plan.chosen is not None
    return {
        "states_1": states_gb(work("llama3-8b"), 1),
        "states_8": states_gb(work("llama3-8b"), 8),
        "have": device("H100-80").memory_bytes / GB,
        "micro_batch": plan.chosen.micro_batch,
        "peak": plan.chosen.peak_bytes / GB,
    }


# -- traffic ------------------------------------------------------------------------------------
def sent(job: Workload, one: ParallelLayout) -> float:
    """GB that one rank sends in a step."""
    return sum(row.num_bytes for row in collectives(job, one)) / GB


@figure
def traffic() -> Numbers:
    """Elements and bytes per parameter in the limit of many ranks, and of 70 B over 8 ranks."""
    seventy, half = nominal(70), nominal(70, reduce_width=2)
    ring = 70 * 7 / 8
    single = layout(8, reshard=False)
    return {
        "ddp_elements": sent(nominal(70, reduce_width=1), layout(1, 8)) / ring,
        "fsdp_elements": sent(half, layout(8)) / 2 / ring,
        "zero2_elements": sent(half, single) / 2 / ring,
        "ddp_bytes": sent(seventy, layout(1, 8)) / ring,
        "fsdp_bytes": sent(seventy, layout(8)) / ring,
        "fsdp_half_bytes": sent(half, layout(8)) / ring,
        "ddp_half_bytes": sent(half, layout(1, 8)) / ring,
        "zero2_bytes": sent(seventy, single) / ring,
        "zero2_half_bytes": sent(half, single) / ring,
        "fsdp_gb": sent(seventy, layout(8)),
        "fsdp_half_gb": sent(half, layout(8)),
        "ddp_7b_gb": sent(nominal(7), layout(1, 8)),
        "ddp_7b_half_gb": sent(nominal(7, reduce_width=2), layout(1, 8)),
    }


@figure
def hybrid_traffic() -> Numbers:
    """70 B on 64 devices in nodes of 8: what crosses nodes with FULL_SHARD and with groups of 8."""
    numbers: Numbers = {}
    for name, one in (("full", layout(64)), ("hybrid", layout(8, 8)), ("wide", layout(32, 2))):
        rows = collectives(nominal(70), one)
        across = [row.num_bytes for row in rows if crosses_nodes(row, one)]
        numbers[f"{name}_network"] = sum(across) / GB
        numbers[f"{name}_nvlink"] = sum(row.num_bytes for row in rows) / GB - sum(across) / GB
    return numbers


@figure
def overheads() -> Numbers:
    """Share of a step that waits for parameters and gradients, with FSDP."""
    numbers: Numbers = {}
    for name, nodes, tokens in (("node", 1, 8192), ("far", 8, 8192), ("short", 8, 2048)):
        one = work("llama3-8b", tokens, 8 * nodes)
        time = step_time(one, layout(8 * nodes, checkpointing=FULL), hardware("H100-80"))
        numbers[f"{name}_exposed"] = time.exposed / time.seconds
    seventy, apart = work("llama3-70b", 8192, 64), layout(64, checkpointing=FULL)
    time = step_time(seventy, apart, hardware("H100-80"))
    numbers["b70_hidden"], numbers["b70_exposed"] = time.hidden, time.exposed
    numbers["b70_compute"] = time.seconds - time.exposed
    numbers["b70_sent"] = sent(seventy, apart)
    return numbers


@figure
def ddp_against_fsdp() -> Numbers:
    """Largest model of DDP on eight A100: five layers of Llama 3 8B."""
    eight = work("llama3-8b", 2048, 32)
    model = msgspec.structs.replace(eight.model, num_layers=5)
    counts = msgspec.structs.replace(eight.counts, num_layers=5)
    small = msgspec.structs.replace(eight, model=model, counts=counts)
    on, replicas = hardware("A100-80"), layout(1, 8, micro_batch=4)
    ddp, fsdp = step_time(small, replicas, on), step_time(small, layout(8, micro_batch=4), on)
    return {
        "billions": small.counts.total / GB,
        "more": fsdp.seconds / ddp.seconds - 1,
        "ddp_exposed": ddp.exposed / ddp.seconds,
        "fsdp_exposed": fsdp.exposed / fsdp.seconds,
        "peak": peak_gb(small, replicas),
    }


@figure
def tensor_axis() -> Numbers:
    """70 B, tensor axis 8 inside a node of eight, and 16 over two."""
    one, on, numbers = work("llama3-70b", 8192, 64), hardware("H100-80"), {}
    for name, mesh in (("inside", Mesh(1, 8, 8)), ("across", Mesh(1, 4, 16))):
        apart = ParallelLayout(
            mesh=mesh, workers_per_node=8, micro_batch=1, num_micro_batches=8, checkpointing=FULL
        )
        time = step_time(one, apart, on)
        waits = {part.what: part.seconds for part in time.parts}["tensor and context axes"]
        numbers[f"{name}_waits"] = waits / time.seconds
        rows = [row for row in collectives(one, apart) if row.axes == ("tensor",)]
        numbers[f"{name}_calls"] = sum(row.calls for row in rows)
        numbers[f"{name}_gb"] = sum(row.num_bytes for row in rows) / GB
    return numbers


@figure
def bubble() -> Numbers:
    """Four stages: idle time over the time of the work, (p - 1) / m."""
    numbers: Numbers = {}
    one, on = work("llama3-70b", 4096, 1024), hardware("H100-80")
    for micro in (4, 8, 32):
        apart = ParallelLayout(
            mesh=Mesh(1, 1, 8, 1, 4), workers_per_node=8, micro_batch=1, num_micro_batches=micro
        )
        time = step_time(one, apart, on)
        parts = {part.what: part.seconds for part in time.parts}
        numbers[f"m{micro}"] = parts["pipeline bubble"] / (
            time.seconds - parts["pipeline bubble"] - parts["optimizer"]
        )
        numbers[f"formula_m{micro}"] = 3 / micro
    return numbers


@figure
def buckets() -> Numbers:
    """DDP's all-reduce of the float32 gradients of 8 B on 32 A100, 400 Gbit/s each, 8,192 tokens a
    rank: milliseconds that a size of its buckets exposes, which are the last bucket, and all that
    is longer than backward. Source: Li et al. 2020 (PyTorch Distributed), section 3.2.3."""
    on, ranks, job = hardware("A100-80"), 32, work("llama3-8b", 8192, 32)
    nodes, gradients = ranks // 8, 4 * job.counts.total
    hop = 2 * ((ranks - nodes) * on.node_link.latency + (nodes - 1) * on.network.latency)
    speed = min(on.node_link.bandwidth, 8 * on.network.bandwidth) * ranks / (2 * (ranks - 1))
    time = step_time(job, layout(1, ranks), on)
    compute = sum(part.seconds for part in time.parts if not part.exposed)
    backward = 2 / 3 * compute
    numbers: Numbers = {"backward": backward, "states": states_gb(job, 1)}
    exposed = {}
    for mib in BUCKETS_MIB:
        calls = math.ceil(gradients / (mib * 2**20))
        seconds = calls * hop + gradients / speed
        exposed[mib] = 1000 * (mib * 2**20 / speed + hop + max(0.0, seconds - backward))
        numbers |= {f"calls{mib}": calls, f"ms{mib}": exposed[mib], f"all{mib}": seconds}
    numbers["best"] = min(exposed, key=lambda mib: exposed[mib])
    numbers["share25"] = exposed[25] / 1000 / time.seconds
    return numbers


# -- throughput and price -----------------------------------------------------------------------
CLAIMS = {
    "F02": ("llama2-7b", 8, "A100-80", 1e6),
    "F03": ("llama3-70b", 64, "H100-80", 5e5),
    "F04": ("gpt3-175b", 384, "A100-80", 2e5),
}
"""Line -> model, devices, kind and claimed tokens/s."""
ORDINARY = 0.45
"""Share of the peak that good runs reach (TorchTitan's tables: 0.38 to 0.52)."""


def claimed(name: str) -> tuple[Workload, int, str, float]:
    """A claim with the shortest sequence in use, which is to its advantage."""
    model, number, kind, tokens = CLAIMS[name]
    return work(model, 2048), number, kind, tokens


@figure
def throughput() -> Numbers:
    numbers: Numbers = {}
    for name in CLAIMS:
        job, number, kind, tokens = claimed(name)
        most = ceiling(job, number, device(kind))
        numbers |= {
            f"{name}_most": most,
            f"{name}_share": tokens / most,
            f"{name}_ordinary": ORDINARY * most,
        }
    return numbers


@figure
def price() -> Numbers:
    one = device("H100-80").price
    assert one is not None
    plan = planned("llama3-70b", "8xH100-80")
    assert plan.chosen is not None and plan.chosen.tokens_per_s is not None
    return {
        "date": one.date,
        "hour": 8 * one.per_hour,
        "day": 24 * 8 * one.per_hour,
        "three_days": 72 * 8 * one.per_hour,
        "per_billion": plan.chosen.dollars_per_billion_tokens,
        "day_tokens": 86_400 * plan.chosen.tokens_per_s / 1e9,
        **{
            key: device(name).price.per_hour  # type: ignore[union-attr]
            for key, name in (("ada4000", "RTX-4000-Ada"), ("ada6000", "RTX-6000-Ada"),
                              ("l40s", "L40S"), ("mi300x", "MI300X"), ("h100", "H100-80"))
        },
    }  # fmt: skip


@figure
def epoch_70b() -> Numbers:
    full = 7.2 * 3600 * 1.3
    return {
        "steps": full, "per_step": 50_000 / full,
        "states": states_gb(work("llama3-70b"), 8),
    }  # fmt: skip


@figure
def devices_of_catalogue() -> Numbers:
    numbers: Numbers = {}
    for key, name in (("a40", "A100-40"), ("a80", "A100-80"), ("h100", "H100-80"),
                      ("h200", "H200"), ("rtx4090", "RTX-4090"), ("mi300x", "MI300X"),
                      ("b200", "B200"), ("l40s", "L40S"), ("pcie", "H100-PCIe"),
                      ("nvl", "H100-NVL")):  # fmt: skip
        one = device(name)
        numbers[key] = one.memory_bytes / GB
        numbers[f"{key}_peak"] = one.flops["bfloat16"] / 1e12
    on = hardware("H100-80")
    numbers["nvlink3"] = hardware("A100-80").node_link.bandwidth / 1e9
    numbers["nvlink4"] = on.node_link.bandwidth / 1e9
    numbers["network"] = on.network.bandwidth / 1e9
    return numbers


# -- scenarios and exercises that the lines name ------------------------------------------------
@figure
def scenario_needs() -> Numbers:
    """GB of a device with the strategies of scenarios 2 and 5, and recomputation."""
    return {
        "two": peak_gb(work("llama2-13b"), layout(8, reshard=False, **LEAST)),
        "five": peak_gb(work("llama3-405b"), layout(128, tensor=8, **LEAST)),
        "have": device("A100-80").memory_bytes / GB,
    }


@figure
def exercise_1() -> Numbers:
    job = work("llama2-13b", 2048)
    return {
        "ddp": states_gb(job, 1),
        "full": states_gb(job, 8),
        "peak": peak_gb(job, layout(8, **LEAST)),
        "have": device("A100-40").memory_bytes / GB,
    }


@figure
def exercise_3() -> Numbers:
    return {
        "b8": peak_gb(work("llama3-8b"), layout(8, 4, **LEAST)),
        "b70": peak_gb(work("llama3-70b"), layout(8, 4, **LEAST)),
        "wide": peak_gb(work("llama3-70b"), layout(32, **LEAST)),
        "have": device("H100-80").memory_bytes / GB,
    }


@figure
def exercise_6() -> Numbers:
    sizes = {"dim": 1024, "layers": 11, "vocabulary": 32_000}
    model = of_recipe(
        Model(vocabSize=sizes["vocabulary"], dim=sizes["dim"], numLayers=sizes["layers"],
              numHeads=16)
    )  # fmt: skip
    return {**sizes, "millions": count_parameters(model).total / 1e6}
