"""`python -m tests.strategies.page`: runs these tests and writes bench/results/strategies.md from
those that passed. It takes half an hour on two cores; if tests failed, `--failed` runs these
again, at the same commit, and adds what the others showed.

A test records what it shows with the fixture `shows(strategy, column, text)`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "bench/results/strategies.md"
COLUMNS = {
    "equal": "trains as one process does",
    "worker": "a worker is killed",
    "node": "a node is lost",
    "resized": "shrinks and grows",
    "reshards": "its checkpoint continues as",
}
NOT_SHOWN = "-"
KEPT = Path(__file__).parents[2] / ".pytest_cache/strategies.json"
"""Results of a run with failures, and its commit."""

BEGINNING = """# Strategies

What each strategy of `spec.parallelism` was seen to do, in the recipe `pretrain` over gloo on one
machine, with models of two to four blocks. This table is written by
`python -m tests.strategies.page` from the tests that passed; the same tests run in `make test-all`,
those of losses in `make test`.
A dash: no test in tests/strategies shows it.

* **{equal}**: losses and gradient norms of the first steps equal those of one process, to the
  tolerance of float32 sums in another order.
* **{worker}**, **{node}**: the job goes on by itself; steps lost, and where the state came from.
  Losses, weights and optimizer at the end have the bits of an undisturbed job on the same mesh.
* **{resized}**: a node leaves and comes back; the global batch and the losses stay.
* **{reshards}**: the strategy that continued its checkpoint with equal losses.

"""


class Recorder:
    """A pytest plugin: what the tests that passed have shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str, str, str]] = []
        """File of the test, strategy, column, text."""
        self.num_failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            file = report.nodeid.split("::")[0]
            values = [value for name, value in report.user_properties if name == "shows"]
            self.shown += [(file, *value) for value in values]
        self.num_failed += report.failed

    def found(self) -> dict[str, dict[str, str]]:
        """Strategy -> column -> text. Two processes run the files, each file in its order."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for _file, strategy, column, text in sorted(self.shown, key=lambda shown: shown[0]):
            cells = found[strategy]
            cells[column] = f"{cells[column]}; {text}" if column in cells else text
        return found


def render(found: dict[str, dict[str, str]], torch_version: str, commit: str) -> str:
    lines = [
        "| strategy | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for strategy, cells in found.items():
        row = [cells.get(column, NOT_SHOWN) for column in COLUMNS]
        lines.append(f"| {strategy} | " + " | ".join(row) + " |")
    end = f"\ntorch {torch_version}, commit {commit}.\n"
    return BEGINNING.format(**COLUMNS) + "\n".join(lines) + "\n" + end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed", action="store_true", help="run what failed the last time")
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    recorder, arguments = Recorder(), ["-q", "--all", "-n", "2", "--dist", "loadfile"]
    if parser.parse_args().failed:
        kept = json.loads(KEPT.read_text())
        if kept["commit"] != commit:
            print(f"the last run was of {kept['commit']}, not of {commit}", file=sys.stderr)
            return 2
        recorder.shown = [tuple(shown) for shown in kept["shown"]]
        arguments.append("--last-failed")
    code = pytest.main([*arguments, str(Path(__file__).parent)], plugins=[recorder])
    if recorder.num_failed or code != 0:
        KEPT.write_text(json.dumps({"commit": commit, "shown": recorder.shown}))
        print(f"{PAGE.name} is not written: {recorder.num_failed} failures", file=sys.stderr)
        return 1
    PAGE.write_text(render(recorder.found(), version("torch"), commit))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
