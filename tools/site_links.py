"""A hook of mkdocs: links from a page to files outside of docs/ lead to the repository."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, **_other: Any) -> str:
    """`markdown` of one page, with addresses in the repository."""
    folder = Path("docs", page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[1])
        return link[0] if path.startswith("docs/") else f"]({SOURCE}/blob/main/{path}"

    return LINK.sub(replaced, markdown)
