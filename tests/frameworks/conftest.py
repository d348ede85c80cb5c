"""These tests need the environments of `make test-frameworks`; elsewhere they skip."""

from __future__ import annotations

import pytest

from .catalogue import FRAMEWORKS, TORCHTITAN

MISSING = sorted({one.package for one in FRAMEWORKS if not one.installed})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not (item.nodeid.startswith("tests/frameworks/") and "e2e" in item.keywords):
            continue
        missing, callspec = MISSING, getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("name") == TORCHTITAN.name:
            missing = [] if TORCHTITAN.installed else [TORCHTITAN.package]
        if missing:
            reason = f"not installed: {', '.join(missing)}; `make test-frameworks` runs these tests"
            item.add_marker(pytest.mark.skip(reason=reason))
