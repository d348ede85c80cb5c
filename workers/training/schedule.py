"""The learning rate as a function of the step alone, so that it needs no saved state."""

from __future__ import annotations

import math

from holdfast.orchestrator.api.v1alpha1.recipe import Decay, Optimizer


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step`, from 0, of `steps`: a linear warm-up, then the schedule.

    Source of wsd (warm-up, stable, decay): Hu et al., "MiniCPM", 2024, section 4; with a linear
    decay as in Hägele et al., "Scaling laws and compute-optimal training beyond fixed training
    durations", 2024.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    first, span = config.warmup_steps, max(steps - config.warmup_steps, 1)
    schedule = config.learning_rate_schedule
    decay = schedule.cosine or schedule.linear or schedule.wsd or Decay()
    if schedule.wsd:
        span = schedule.wsd.decay_steps or max(1, steps // 10)
        first = steps - span
    done = min(max((step - first) / span, 0.0), 1.0)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": 1 - done,
        "constant": 1.0,
    }[schedule.chosen]
    return config.learning_rate * (decay.min_ratio + (1 - decay.min_ratio) * left)
