"""These tests need the environments of `make test-frameworks`; elsewhere they skip."""

from __future__ import annotations

import importlib.util

import pytest

from .catalogue import APART, FRAMEWORKS

MISSING = sorted({one.package for one in FRAMEWORKS if not one.installed})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not (item.nodeid.startswith("tests/frameworks/") and "e2e" in item.keywords):
            continue
        missing, callspec = MISSING, getattr(item, "callspec", None)
        if needs := getattr(getattr(item, "module", None), "NEEDS", ()):
            missing = [name for name in needs if importlib.util.find_spec(name) is None]
        name = callspec.params.get("name") if callspec is not None else None
        if (apart := next((one for one in APART if one.name == name), None)) is not None:
            missing = [] if apart.installed else [apart.package]
        if missing:
            reason = f"not installed: {', '.join(missing)}; `make test-frameworks` runs these tests"
            item.add_marker(pytest.mark.skip(reason=reason))
