"""Code blocks of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.name.startswith("job-spec")),
)
"""Pages that are written by hand."""


def blocks(text: str, *languages: str) -> list[list[str]]:
    """The lines of each block in one of the languages; a continued line is one line."""
    found = re.findall(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        body.replace("\\\n", " ").splitlines() for language, body in found if language in languages
    ]
