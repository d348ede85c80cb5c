"""Names of a job's actors in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.orchestrator.backends.ray import names


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (names.agent("holdfast-a", "node-1"), names.controller("a-node-1")),
        (names.agent("a", "node-1"), names.controller("a-node-1")),
        (names.agent("a-node-1", "node-2"), names.agent("a", "node-1")),
    ],
)
def test_names_of_two_jobs_are_never_the_same(one: str, other: str) -> None:
    assert one != other


def test_an_actor_belongs_to_a_job_by_its_name() -> None:
    assert names.belongs(names.controller("a"), "a")
    assert names.belongs(names.agent("a", "node-12"), "a")
    others: list[Callable[[], str]] = [
        lambda: names.controller("a-node-1"),
        lambda: names.agent("a-b", "node-1"),
        lambda: names.agent("a-node-1", "node-2"),
    ]
    assert not any(names.belongs(other(), "a") for other in others)
