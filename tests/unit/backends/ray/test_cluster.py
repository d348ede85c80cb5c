"""Connecting to a cluster: versions, and a cluster that does not answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import cluster
from holdfast.orchestrator.errors import UserError


@pytest.mark.parametrize("version", ["2.50.1", "2.40.0", "2.9.3", "1.13.0"])
def test_a_ray_that_is_too_old_is_refused_by_its_version(version: str) -> None:
    with pytest.raises(UserError, match=f"ray: got {version}; expected 2.51 or newer"):
        cluster.check_version(version)


@pytest.mark.parametrize("version", ["2.51.0", "2.52.1", "2.60.0", "3.0.0.dev0"])
def test_a_ray_that_is_new_enough_is_accepted(version: str) -> None:
    cluster.check_version(version)


def test_a_connection_error_of_ray_without_text_is_reported_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_options: Any) -> None:
        raise ConnectionError  # Ray 2.51

    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_init", fail)
    with pytest.raises(UserError, match=f"got auto \\(no head of Ray {ray.__version__}, .* answer"):
        cluster.connect("auto")


def test_a_token_that_ray_cannot_read_is_reported_in_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

    def fail(**_options: Any) -> None:
        raise ray.exceptions.RayError("RAY_AUTH_TOKEN_PATH is set but\n  file cannot be opened")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_init", fail)
    with pytest.raises(UserError, match=r"got auto \(RAY_AUTH_TOKEN_PATH is set but file cannot"):
        cluster.connect("auto")


def test_the_error_of_a_grpc_thread_about_a_closed_channel_is_not_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda raised: printed.append(str(raised.exc_value))
    )

    def fail(text: str) -> None:
        raise ValueError(text)

    cluster._hide_closed_channels()
    for text in ("Cannot monitor channel state: Channel closed!", "another error"):
        thread = threading.Thread(target=fail, args=(text,))
        thread.start()
        thread.join()
    assert printed == ["another error"]
