"""The planner's memory and traffic beside those of a training step, on every configuration.

python -m bench.plan_accuracy                             # twenty minutes on two cores
python -m bench.plan_accuracy --only offload --json measured.json --out page.md
python -m bench.plan_accuracy --measured measured.json    # after a change of the planner
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

from bench import conditions

from .cases import CASES
from .drawn import drawn
from .report import Comparison, as_json, compare, is_of, page, recall

DRAWN = {"drawn": 1, "held out": 2}
"""Family -> seed of its jobs. Errors that those of the first showed were mended; those of the
second were compared after that."""
NUM_DRAWN = 30
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_accuracy.md")
    parser.add_argument("--json", type=Path, help="also write every phase and category here")
    parser.add_argument(
        "--measured", type=Path, help="a file of --json: what is in it is not measured again"
    )
    parser.add_argument("--only", action="append", help="a part of a family's or a case's name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    wanted = options.only or [""]
    every = [*CASES]
    for family, seed in DRAWN.items():
        every += drawn(seed, NUM_DRAWN, family)
    cases = [c for c in every if any(part in f"{c.family} {c.name}" for part in wanted)]
    if not cases:
        names = ", ".join(dict.fromkeys(case.family for case in every))
        parser.error(f"--only: got {wanted}; expected a part of a name; families: {names}")
    if options.measured and not options.measured.is_file():
        parser.error(f"--measured: got {options.measured}; expected a file that --json wrote")
    known = json.loads(options.measured.read_text()) if options.measured else []
    found: list[Comparison] = []
    for case in cases:
        entry = next((entry for entry in known if is_of(entry, case)), None)
        one = compare(case) if entry is None else recall(case, entry)
        found.append(one)
        print(
            f"{case.name:40s} {one.measured.peak.num_bytes / 2**20:9.1f} MiB, predicted "
            f"{one.peak_error:+7.1%}; states {one.states_error:+7.2%}; sent {one.sent_error:+7.2%}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([as_json(each) for each in found], indent=1))
    options.out.write_text(page(found, conditions.describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
