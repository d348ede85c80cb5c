"""Imports before the first fork leave nothing behind that an agent would misread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol.environment import CACHES, chosen_cache
from holdfast.workers.agent.pool.preload import import_all


def test_the_default_cache_of_torch_is_not_taken_for_a_choice_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [f"os.environ.setdefault({name!r}, '/tmp/default')" for name in CACHES]
    (tmp_path / "sets_caches.py").write_text("\n".join(["import os", *lines]))
    for name in CACHES:
        monkeypatch.setenv(name, "")  # so that it is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", "/home/u/cache")
    import_all(["sets_caches"])
    assert "sets_caches" in sys.modules
    assert chosen_cache(os.environ) == "/home/u/cache"
    monkeypatch.setenv(CACHES[0], "/mine")
    monkeypatch.delitem(sys.modules, "sets_caches")
    import_all(["sets_caches"])
    assert os.environ[CACHES[0]] == "/mine" and chosen_cache(os.environ) == ""
