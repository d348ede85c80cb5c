"""`python -m tests.strategies.page`: runs these tests and writes docs/concepts/strategies.md from
those that passed.

A test records what it shows with the fixture `shows(strategy, column, text)`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/concepts/strategies.md"
COLUMNS = {
    "equal": "trains as one process does",
    "worker": "a worker is killed",
    "node": "a node is lost",
    "resized": "shrinks and grows",
    "reshards": "its checkpoint continues as",
}
NOT_SHOWN = "-"

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
    recorder = Recorder()
    arguments = ["-q", "--all", "-n", "2", "--dist", "loadfile", str(Path(__file__).parent)]
    code = pytest.main(arguments, plugins=[recorder])
    if recorder.num_failed or code != 0:
        print(f"{PAGE.name} is not written: {recorder.num_failed} failures", file=sys.stderr)
        return 1
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    PAGE.write_text(render(recorder.found(), version("torch"), commit))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
