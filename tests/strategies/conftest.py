"""Fixtures of the tests of strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local.local_rig import Job

from .page import COLUMNS

Start = Callable[[dict[str, Any]], Job]
Shows = Callable[[str, str, str], None]


@pytest.fixture
def shows(record_property: Callable[[str, object], None]) -> Shows:
    """Record a cell of bench/results/strategies.md: strategy, column, text. It counts if the test
    passes."""

    def record(strategy: str, column: str, text: str) -> None:
        assert column in COLUMNS
        record_property("shows", (strategy, column, text))

    return record


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job in a directory of its own."""
    jobs: list[Job] = []

    def run(document: dict[str, Any]) -> Job:
        place = tmp_path / document["metadata"]["name"]
        place.mkdir()
        jobs.append(Job(place, document))
        jobs[-1].run()
        return jobs[-1]

    yield run
    for job in jobs:
        job.end()
