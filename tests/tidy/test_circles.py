"""No modules of the product import each other in a circle, for types neither."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(("holdfast", *path.relative_to(ROOT).with_suffix("").parts)): path
    for top in ("orchestrator", "workers")
    for path in (ROOT / top).rglob("*.py")
    if path.name != "__init__.py"
}


def imported(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def expect_no_circle(texts: dict[str, str]) -> None:
    """Raises CycleError, which names the modules."""
    graph = {name: set(imported(name, text)) & texts.keys() for name, text in texts.items()}
    TopologicalSorter(graph).prepare()


def test_no_modules_import_each_other_in_a_circle() -> None:
    expect_no_circle({name: path.read_text() for name, path in MODULES.items()})


def test_an_import_for_types_alone_counts_as_a_part_of_a_circle() -> None:
    lazy = "if TYPE_CHECKING:\n    from .first import First"
    with pytest.raises(CycleError):
        expect_no_circle({"h.first": "from . import second", "h.second": lazy})
