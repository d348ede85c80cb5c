"""Interval k at which the memory tier stages steps, chosen so that staging keeps to a budget.

A staging costs the time that it blocks the training loop, and the part of the copy from the device
that does not fit beside the next forward and backward. k is the smallest number with which that
cost, spread over k steps, is within `checkpoint.memory.budgetPercent` of a step, and with which a
staging is complete before the next one begins. Pure; decided on StepCompleted, so a replay decides
the same. All ranks change at one step that lies ahead of them.
"""

from __future__ import annotations

import math
from statistics import median

import msgspec

from .. import limits
from ..api.v1alpha1 import Checkpoint
from ..protocol.facts import SCRIPT_SOURCES, steps_done
from ..protocol.messages import Heartbeat, StageEvery
from . import quiesce
from .actions import Reason, ToNode
from .context import SECOND_NS, StepContext
from .events import StepCompleted
from .state import JobState, StagingInterval, StagingSample

HIDDEN = 0.5
"""Share of a step beside which the copy from the device is assumed to run. The optimizer comes at
the end of a step, but a loop may evaluate or log before; half is on the safe side."""
SAMPLES = 3
"""Stagings that are measured before a decision; their median counts, not a slow moment."""
SETTLED_STEPS = 16
"""Steps in a new interval before it is judged: half of the steps that the median is over."""
RAISE, LOWER = 1.25, 0.5
"""Change the interval if the wanted one is larger, or smaller, than this many times the current."""
LOWER_AFTER_S = 60.0
"""A shorter interval is tried at most this often: a slow moment must not be followed by another."""


class Costs(msgspec.Struct, frozen=True):
    """Costs of one staging, on the slowest rank."""

    blocked_s: float
    """Seconds that a staging blocks the training loop, without the wait for the one before."""
    delayed_s: float
    """The copy delays the next optimizer step."""
    step_s: float
    """A step without staging."""
    whole_s: float
    """Seconds from its beginning to its end."""

    @property
    def total_s(self) -> float:
        return self.blocked_s + self.delayed_s


def is_auto(checkpoint: Checkpoint) -> bool:
    return checkpoint.memory.every_steps == "auto"


def at_launch(state: JobState) -> int:
    """The interval for LaunchGroup: 0 where the spec has the number."""
    chosen = state.staging.interval
    differs = is_auto(state.job.spec.checkpoint) or (chosen is not None and chosen.for_storage)
    return state.stage_every_steps if differs else 0


def measured(event: StepCompleted, samples: list[StagingSample], every: int) -> Costs:
    """Medians. That of the step time has the staging in it if most steps do."""
    stall_s = median(sample.stall_s for sample in samples)
    copy_s = median(sample.copy_s for sample in samples)
    staging_s = median(sample.staging_s for sample in samples)
    step_s = event.step_s
    if every <= 2:
        step_s -= stall_s / every
    step_s = max(step_s, event.step_s / 10)
    waited_s = max(0.0, staging_s - every * step_s) if copy_s else 0.0
    blocked_s = max(0.0, stall_s - waited_s)
    delayed_s = max(0.0, copy_s - HIDDEN * step_s)
    return Costs(blocked_s, delayed_s, step_s, staging_s)


def wanted(costs: Costs, budget_percent: float, most: int) -> int:
    """The smallest interval within the budget, and at least as long as a staging takes."""
    budget_s = budget_percent / 100 * costs.step_s
    fits = math.ceil(costs.total_s / budget_s - 1e-9)
    return max(1, min(most, max(fits, math.ceil(costs.whole_s / costs.step_s))))


def longest(checkpoint: Checkpoint) -> int:
    """Steps for storage are staged too, so a longer interval would not change anything."""
    storage = checkpoint.storage
    if storage.every_s is not None:
        return limits.MAX_STAGING_INTERVAL
    return min(limits.MAX_STAGING_INTERVAL, storage.every_steps or limits.STORAGE_EVERY_STEPS)


def consider(ctx: StepContext, event: StepCompleted) -> None:
    """Choose the interval again if what was measured asks for it."""
    state, checkpoint = ctx.state, ctx.state.job.spec.checkpoint
    steady = state.stop is None and state.quiesce is None and not quiesce.pace_left_s(state)
    if steady and state.stages_for_storage_only:
        if state.staging.interval is None or not state.staging.interval.for_storage:
            _stage_for_storage(state, ctx.now_ns, quiesce.step_ahead(state))
        return
    if not is_auto(checkpoint) or event.staging_s <= 0 or event.step_s <= 0 or not steady:
        return
    chosen, interval = state.staging.interval, state.stage_every_steps
    if chosen is not None and state.step < chosen.judged_from:
        return
    number = (state.step + 1) // interval  # the report has the last staging, not one of this step
    if not state.staging.samples or state.staging.samples[-1].number != number:
        sample = StagingSample(number, event.stall_s, event.copy_s, event.staging_s)
        state.staging.samples = [*state.staging.samples, sample][-SAMPLES:]
    if len(state.staging.samples) < SAMPLES:
        return
    costs, most = measured(event, state.staging.samples, interval), longest(checkpoint)
    best = wanted(costs, checkpoint.memory.budget_percent, most)
    waited_s = (ctx.now_ns - chosen.chosen_ns) / SECOND_NS if chosen is not None else LOWER_AFTER_S
    longer = best > RAISE * interval
    shorter = best < LOWER * interval and waited_s >= LOWER_AFTER_S
    if chosen is not None and not (longer or shorter):
        return
    _choose(ctx, best, costs, longer or shorter)


def _stage_for_storage(state: JobState, now_ns: int, since_step: int) -> None:
    interval = longest(state.job.spec.checkpoint)
    reason = Reason("checkpoint", f"every {interval} steps, for storage only: see host memory")
    state.staging.interval = StagingInterval(
        every_steps=interval,
        since_step=since_step,
        judged_from=since_step,
        chosen_ns=now_ns,
        reason=reason,
        for_storage=True,
    )


def _choose(ctx: StepContext, every: int, costs: Costs, changes: bool) -> None:
    state = ctx.state
    begin = quiesce.step_ahead(state) if changes else state.step
    text = _sentence(every, costs, state.job.spec.checkpoint)
    state.staging.interval = StagingInterval(
        every_steps=every,
        since_step=begin if changes else 0,
        judged_from=begin + max(every, SETTLED_STEPS),
        chosen_ns=ctx.now_ns,
        reason=Reason("checkpoint", text),
    )
    if changes:
        state.staging.samples = []
        ctx.note(f"after {steps_done(begin - 1)}, the memory tier stages {text}")


def _sentence(every: int, costs: Costs, checkpoint: Checkpoint) -> str:
    often = f"every {every} steps" if every > 1 else "every step"
    share = 100 * costs.total_s / every / costs.step_s
    copy = f", of which the copy {costs.delayed_s:.2g} s" if costs.delayed_s else ""
    budget = checkpoint.memory.budget_percent
    why = f"{often}; {costs.total_s:.2g} s each{copy} = {share:.2g} % of the step time"
    if share > budget and every == longest(checkpoint):
        return f"{why}, in the longest interval (budget {budget:g} %)"
    if costs.whole_s > costs.step_s and math.ceil(costs.whole_s / costs.step_s) == every:
        return f"{often}; a staging takes {costs.whole_s:.2g} s, a step {costs.step_s:.2g} s"
    return f"{why} (budget {budget:g} %)"


def begin_generation(state: JobState) -> None:
    """Begin with the last generation's interval, which is judged again."""
    last, state.staging.samples = state.staging.interval, []
    if state.stages_for_storage_only:
        _stage_for_storage(state, state.now_ns, 0)
    elif last is not None and last.for_storage:
        state.staging.interval = None
    elif last is not None:
        judged = state.step + 1 + max(last.every_steps, SETTLED_STEPS)
        state.staging.interval = msgspec.structs.replace(last, since_step=0, judged_from=judged)


def orders(state: JobState, node: str, beat: Heartbeat) -> list[ToNode]:
    """Orders for a member whose heartbeat shows another interval than the chosen one."""
    chosen, runs = state.staging.interval, state.stop is None and state.is_member(node)
    if chosen is None or not runs or beat.generation != state.generation:
        return []
    interval, since = chosen.every_steps, chosen.since_step
    has_workers = beat.stage_every_steps or chosen.for_storage
    if not has_workers or (beat.stage_every_steps, beat.stage_from_step) == (interval, since):
        return []
    wanted = StageEvery(generation=state.generation, every_steps=interval, from_step=since)
    return [ToNode(node, wanted)]


def describe(state: JobState) -> str:
    """Every how many steps the memory tier stages, and why; empty without a memory tier, and for a
    script that keeps its own checkpoints."""
    checkpoint = state.job.spec.checkpoint
    if not checkpoint.memory.every_steps or state.counted_by in SCRIPT_SOURCES:
        return ""
    chosen = state.staging.interval
    if not is_auto(checkpoint) and not (chosen and chosen.for_storage):
        number = checkpoint.staging_interval
        often = f"every {number} steps" if number > 1 else "every step"
        return f"{often}: checkpoint.memory.everySteps"
    if chosen is None:
        return "every step, until stagings are measured" if state.group.first_step_ns else ""
    return chosen.reason.text
