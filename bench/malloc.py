"""What it is worth that workers keep the memory they free (orchestrator/protocol/environment.py).

    python -m bench.malloc                     # twenty minutes

Two local jobs of the same workload in turns (turns.py): one as it ships, one whose environment has
glibc's malloc left as it comes.

Owns: the sides and the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from . import conditions, turns
from .contestants.base import Workload
from .contestants.holdfast import NUM_RANKS, Holdfast

RESULTS = Path(__file__).parent / "results"
KEPT, GIVEN_BACK = "kept", "glibc's own"
PAIRS = [(KEPT, GIVEN_BACK)]
NO_CHANGE = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""glibc's default; but with a tunable of malloc set, Holdfast sets none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=12, help="starts of both jobs")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side in each")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    facts, quiet = conditions.describe(), conditions.wait_until_quiet()
    try:
        for found in turns.starts(
            lambda name: both(directory / name), PAIRS, options.reps, options.rounds
        ):
            write(facts, quiet, found, options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print((RESULTS / "malloc.md").read_text())
    return 0


def both(directory: Path) -> dict[str, Holdfast]:
    sides = {KEPT: {}, GIVEN_BACK: NO_CHANGE}
    return {
        side: Holdfast(
            Workload(directory / side.split()[0], steps=turns.STEPS),
            patience_s=turns.PATIENCE_S,
            environment=environment,
        )
        for side, environment in sides.items()
    }


def write(facts: dict[str, str], quiet: float, found: list[turns.Samples], rounds: int) -> None:
    lines = ["# Memory that a worker frees: kept for the next step, or given back", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}. "
        f"{turns.how(len(found), rounds)} {NUM_RANKS} ranks on two local nodes, HSDP 2 x 2 over "
        "gloo, one thread a rank, 3.3 M parameters.",
        "",
        *turns.table(PAIRS, found),
    ]
    results = {"conditions": facts, "turns": rounds, "starts": turns.raw(found)}
    (RESULTS / "malloc.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "malloc.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
