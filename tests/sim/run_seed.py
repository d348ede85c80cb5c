"""Runs one seed to the end and checks what is left."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.orchestrator.core.context import SECOND_NS

from .world import BOUND_S, World


def play(
    seed: int,
    verbose: bool = False,
    faults: Callable[[World], None] = World.schedule_faults,
    make: Callable[[int, bool], World] = World,
) -> World:
    """Raises AssertionError, naming the seed, if anything unsafe happens or the job never ends."""
    world = make(seed, verbose)
    world.after(0.0, world.host.start)
    faults(world)

    def over() -> bool:
        return world.oracle.finished and world.host.up and world.host.loop.ended

    done = world.run(BOUND_S, over)
    host, require, state = world.host, world.oracle.require, world.host.state
    require(done, f"not over: {state.phase}, {state.reason.text}; timers {state.timers}")
    world.run(world.time_s + 60.0, lambda: False)
    require(not world.backend_nodes(), f"nodes are left: {world.backend_nodes()}")
    left = [w.rank for n in world.nodes.values() for w in n.workers.values() if w.alive]
    left += [w.rank for n in world.nodes.values() for w in n.workers.values() if w.kept]
    require(not left, f"workers are left: {left}")
    world.storage.check_retention()
    view = host.loop.view(host.now)
    require(view.state == state.phase and view.step == state.step, f"the view has {view.state}")
    for incident in state.incidents:
        after = incident.resumed_after_step
        known = after is None or incident.step_before >= after
        require(known, f"resumes after {after}, {incident.step_before} was the last step")
    took_s = ((view.finished_ns or host.now) - view.submitted_ns) / SECOND_NS
    accounted_s = sum(view.ledger.values())
    require(abs(accounted_s - took_s) < 1e-6, f"{accounted_s} s of {took_s} s are accounted for")
    world.oracle.accounts(view.ledger)
    world.oracle.carried_out_once(state)
    expected = ["failed" if world.poison is not None else "succeeded"]
    expected += ["cancelled"] if world.cancelled else []
    require(state.phase in expected, f"{state.phase}: {state.reason.text}")
    if state.phase == "succeeded":
        final = world.total_steps - 1
        steps = [files[0].step for _mesh, files in world.storage.manifests.values()]
        require(final in steps, f"step {final} is not committed; {steps} are")
    elif state.phase == "failed":
        require("twice" in state.reason.text and bool(state.traceback), state.reason.text)
    world.log(f"{state.phase}: {state.reason.text}")
    return world
