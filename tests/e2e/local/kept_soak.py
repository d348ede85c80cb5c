"""`python -m tests.e2e.local.kept_soak --kind hsdp --kills 200 --place DIR`: many kills of one job
whose survivors keep their process. Its losses and its last checkpoint have to equal
those of a job without kills. `DIR/KIND-SEED.jsonl` has a line for each recovery.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import psutil

from .kept_rig import KINDS, Killer, Steps, scripted
from .local_rig import Job, last_state

SAMPLED_EVERY = 20
TAIL_STEPS = 30


def resources(job: Job, pids: dict[int, int]) -> dict[str, list[int]]:
    """Process -> its descriptors, its threads, and KiB of its own memory."""
    ranks = {pid: f"rank {rank}" for rank, pid in pids.items()}
    rows = {}
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            name = ranks.get(process.pid, process.name())
            own = process.memory_full_info().uss >> 10
            rows[f"{name}, {process.pid}"] = [process.num_fds(), process.num_threads(), own]
    return rows


def run(job: Job, killer: Killer, report: Path, kills: int, steps: int) -> None:
    killer.until(5, 0)
    sampled = 0
    with report.open("w") as out:
        while killer.num_kills < kills and killer.steps.last[0][0] < steps - TAIL_STEPS:
            row: dict[str, Any] = killer.recover()
            killer.until(killer.rng.randint(0, 4), row["generations"][1] - 1)
            if killer.num_kills >= sampled + SAMPLED_EVERY:
                sampled = killer.num_kills
                now = killer.steps.processes(killer.steps.generation)
                row["resources"] = resources(job, {rank: pid for rank, (pid, _) in now.items()})
            print(json.dumps(row), file=out, flush=True)
    job.command.wait()
    assert job.wait().state == "succeeded", job.output()
    killer.steps.read()


def undisturbed(place: Path, kind: str, steps: int, backend: str, env: dict[str, str]) -> Job:
    name = f"calm-{kind}-{steps}{backend}{''.join(env)}"
    job = scripted(place / name, kind, steps, backend, env=env)
    if not (job.place / "done").exists():
        job.run()
        job.command.wait()
        (job.place / "done").touch()
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="hsdp")
    parser.add_argument("--compiled", default="", help="backend of torch.compile, such as inductor")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--only", default="", help="kinds of kills, such as worker,twins")
    parser.add_argument("--nested", type=float, default=1 / 3, help="share of kills in a recovery")
    parser.add_argument("--plain", action="store_true", help="no attempts: the script runs again")
    given = parser.parse_args()
    env = {"PLAIN": "1"} if given.plain else {}
    kinds = {name: KINDS[name] for name in given.only.split(",")} if given.only else KINDS
    calm = undisturbed(given.place, given.kind, given.steps, given.compiled, env)
    place = given.place / f"{given.kind}-{given.seed}{given.compiled}{''.join(env)}"
    job = scripted(place, given.kind, given.steps, given.compiled, env=env)
    job.run()
    killer = Killer(job, given.seed, kinds, given.nested)
    killer.steps.plain = given.plain
    try:
        run(job, killer, job.place.with_suffix(".jsonl"), given.kills, given.steps)
    finally:
        job.end()
    assert killer.steps.losses == Steps(calm.place).losses, "losses differ"
    if "-" in given.kind:
        killer.steps.expect_each_sample_once()
    assert last_state(job, given.steps - 1) == last_state(calm, given.steps - 1), "state differs"
    print(
        f"{given.kind} {given.seed}: {killer.num_kills} kills ({dict(killer.killed)}), "
        f"{killer.steps.generation - 1} recoveries; after {killer.num_recoveries} single kills "
        f"{killer.num_kept} of {killer.num_survivors} survivors kept; losses and state equal",
        flush=True,
    )


if __name__ == "__main__":
    main()
