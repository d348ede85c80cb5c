"""What is said of a cluster that does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.backends.ray import cluster
from orchestrator.protocol.errors import UserError


def test_a_cluster_that_is_gone_without_a_word_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(**_options: Any) -> None:
        raise ConnectionError  # Ray 2.51

    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_init", gone)
    with pytest.raises(UserError, match="got auto \\(nobody answers there as a Ray head"):
        cluster.connect("auto")
