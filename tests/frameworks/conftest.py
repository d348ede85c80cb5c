"""These tests need the environment of `make test-frameworks`; elsewhere they skip."""

from __future__ import annotations

import pytest

from .catalogue import FRAMEWORKS

MISSING = sorted({one.package for one in FRAMEWORKS if not one.installed})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"not installed: {', '.join(MISSING)}; `make test-frameworks` runs these tests"
    for item in items:
        if MISSING and item.nodeid.startswith("tests/frameworks/") and "e2e" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
