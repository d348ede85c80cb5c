"""Checks of figures that a person read somewhere: throughput that no device reaches, epochs of
fewer samples than ranks.

A bound of physics, not an estimate: what is refused here cannot be, on any software.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.orchestrator.catalogue.types import Device
from holdfast.orchestrator.planner.model import attention_flops_per_token, flops_per_token
from holdfast.orchestrator.planner.workload import Workload


class Throughput(NamedTuple):
    """A claimed number of tokens a second beside the bound."""

    ceiling: float
    """Tokens/s of all devices at their peak: no training of this model is faster."""
    share: float
    """Claimed tokens/s / ceiling."""


def least_flops_per_token(work: Workload) -> float:
    """FLOPs that no training of a token does without: every matrix three times, and the half of
    attention that a causal model needs. MFU counts attention in full (flops_per_token), so that a
    share of this bound is never above the MFU of the same run.

    Source: Kaplan et al. 2020, section 2.1 (6 FLOPs for each parameter of a product)."""
    whole = flops_per_token(work.model, work.sequence_length)
    return whole - attention_flops_per_token(work.model, work.sequence_length) / 2


def ceiling(work: Workload, devices: int, device: Device) -> float:
    """Tokens/s of these devices if each computed at its peak without a pause. The peak is that of
    the fastest format that the products of the workload use: float8, or that of the parameters.

    Raises ValueError for a device without a peak in that format."""
    name = "float8" if work.float8 else work.format
    peak = device.flops.get(name)
    if peak is None:
        raise ValueError(f"{device.name} has no peak for {name}")
    return devices * peak / least_flops_per_token(work)


def check_throughput(
    work: Workload, devices: int, device: Device, tokens_per_s: float
) -> Throughput:
    """The claim beside the bound. Raises ValueError for a claim that is not positive, or above what
    the devices can compute at their peak; the message names the bound."""
    if not tokens_per_s > 0:
        raise ValueError(f"got {tokens_per_s:g} tokens/s; expected a number above 0")
    most = ceiling(work, devices, device)
    if tokens_per_s > most:
        raise ValueError(
            f"{devices} x {device.name} cannot train {work.model.name} at {tokens_per_s:,.0f} "
            f"tokens/s: at their peak, without a pause, they compute {most:,.0f}; the claim is "
            f"{tokens_per_s / most:.0%} of that"
        )
    return Throughput(most, tokens_per_s / most)


def check_epoch(samples: int, hours: float, steps_per_s: float, ranks: int) -> float:
    """Samples of a step that an epoch's figures imply: samples / (hours x steps/s). Raises
    ValueError if ranks would be without a sample in a step."""
    steps = hours * 3600 * steps_per_s
    per_step = samples / steps
    if per_step < ranks:
        raise ValueError(
            f"{samples:,} samples in {hours:g} hours at {steps_per_s:g} steps/s are {steps:,.0f} "
            f"steps of {per_step:.2f} samples: {ranks} data-parallel ranks need at least {ranks}"
        )
    return per_step
