"""`python -m tests.sim --seed N [--verbose]`, `--seeds A:B`: the transcript, then one line."""

from __future__ import annotations

import argparse
import time

from .run_seed import play


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seeds", default="0:100", help="from:to, to exclusive")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    first, last = (int(part) for part in given.seeds.split(":"))
    seeds = [given.seed] if given.seed is not None else list(range(first, last))
    for seed in seeds:
        began = time.perf_counter()
        try:
            world = play(seed, given.verbose)
        except AssertionError as error:
            print(f"seed {seed}: FAILED {type(error).__name__}: {error}")
            continue
        state = world.host.state
        print(
            f"seed {seed}: {world.digest} {state.phase} after {world.time_s - 60:.0f} s, "
            f"{world.num_faults} faults, {state.generation} generations, "
            f"{world.host.crashes} crashes; {time.perf_counter() - began:.2f} s real"
        )


if __name__ == "__main__":
    main()
