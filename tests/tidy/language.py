"""Words that the project does not use, each with what to write instead.

`python -m tests.tidy.language [PATH ...]` lists where they stand. The terms that are used are in
docs/contributing/glossary.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Matched without regard to case, and inside snake_case names too.
BANNED: dict[str, str] = {
    "nobody|somebody|anybody|everybody|whoever": "name the component, or the user",
    "told|tells": "sent, reported, notified, received",
    "wish|wishes|wished": "request",
    "anew": "again, from the start, new",
    "for ever": "without end, indefinitely",
    "of late": "recently",
    "heard|hear|hears": "received, observed",
    "forgets|believes": "drops, relies on",
    "says so|say so|said so": "report, raise, log",
    "news": "events, changes",
    "on order": "requested",
    "rooms": "placement groups, packages",
    "crew": "worker pool",
    "strand": "serial executor",
    "mourn|mourned": "collect the exit",
    "remains of": "what is left of",
    "eloquent": "large",
    "by our hand": "by Holdfast",
    "asked for wrongly": "invalid usage",
    "ended unknown": "result unknown",
    "is believed": "heartbeat timeout expired",
    r"owns:": "say what the module does, and its one invariant",
    r"must not:": "say the one invariant as a sentence",
}
PATTERN = re.compile(
    "|".join(rf"(?<![a-z])(?:{words})(?![a-z])" for words in BANNED), re.IGNORECASE
)
SUFFIXES = (".py", ".md", ".yaml", ".tpl", ".txt", ".json")
EXEMPT = ("tests/tidy/language.py", "bench/results/", "tests/e2e/kubernetes/binaries/")


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [n for n in done.stdout.splitlines() if n.endswith(SUFFIXES)]
    return [ROOT / n for n in names if not n.startswith(EXEMPT) and (ROOT / n).is_file()]


def findings(paths: list[Path]) -> Iterator[str]:
    """`file:line: word` for each banned word below these files and directories."""
    for file in tracked():
        if paths and not any(file == p or p in file.parents for p in paths):
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for match in PATTERN.finditer(line):
                yield f"{file.relative_to(ROOT)}:{number}: {match.group(0)}"


if __name__ == "__main__":
    found = list(findings([Path(word).resolve() for word in sys.argv[1:]]))
    print("\n".join(found))
    print(f"{len(found)} places", file=sys.stderr)
    sys.exit(bool(found))
