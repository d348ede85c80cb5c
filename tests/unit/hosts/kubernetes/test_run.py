"""The log of the operator, one JSON document per line."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.orphan_pods import OrphanPods
from holdfast.orchestrator.hosts.kubernetes.run import JsonLines
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import Unreachable

BOUND_S = 20


class Collector:
    """Collects what the loggers of holdfast write, line by line."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.setFormatter(JsonLines())

    @property
    def lines(self) -> list[dict[str, str]]:
        """Each line is parsed as a JSON document."""
        return [json.loads(line) for line in self._text.getvalue().splitlines()]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made, logger = Collector(), logging.getLogger("holdfast")
    level = logger.level
    logger.addHandler(made.handler)
    logger.setLevel(logging.INFO)
    yield made
    logger.removeHandler(made.handler)
    logger.setLevel(level)


def test_a_line_is_a_document_with_time_level_logger_and_message(collector: Collector) -> None:
    before = datetime.datetime.now(datetime.UTC)
    logging.getLogger("holdfast.operator").warning('%d jobs: größer, "quoted",\nin two lines', 3)
    (line,) = collector.lines
    at = datetime.datetime.fromisoformat(line.pop("time"))
    assert at.tzinfo is not None, "comparable wherever the operator runs"
    rounding = datetime.timedelta(milliseconds=1)
    assert before - rounding <= at <= datetime.datetime.now(datetime.UTC)
    assert line == {
        "level": "warning",
        "logger": "holdfast.operator",
        "message": '3 jobs: größer, "quoted",\nin two lines',
    }


def test_a_line_about_a_job_names_the_job(collector: Collector) -> None:
    log = logging.getLogger("holdfast.kubernetes")
    log.info("created again", extra={"job": "team/llm"})
    log.info("standing by")
    assert [line.get("job") for line in collector.lines] == ["team/llm", None]


def test_an_exception_is_in_its_line_with_the_traceback(collector: Collector) -> None:
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        logging.getLogger("holdfast.operator").exception("internal error")
    (line,) = collector.lines
    assert line["level"] == "error" and line["message"] == "internal error"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: one\ntwo")
    assert "test_run.py" in line["exception"]


class ClusterWithoutNodes:
    """A cluster that has lost all nodes and whose API fails once."""

    def __init__(self) -> None:
        self.deleted = asyncio.Event()
        self._failed = False

    async def is_gone(self, place: str) -> bool:
        return True

    async def delete(self, *where: Any, **how: Any) -> None:
        if not self._failed:
            self._failed = True
            raise Unreachable("no answer")
        self.deleted.set()


async def test_force_deleted_pods_are_logged_with_their_job(collector: Collector) -> None:
    cluster = ClusterWithoutNodes()
    watcher = OrphanPods(cast(KubeClient, cluster), cast(NodeInformer, cluster), check_min_s=0.001)
    pod = {
        "metadata": {
            "namespace": "team",
            "name": "llm-x",
            "uid": "1",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"holdfast.dev/job": "llm"},
        },
        "spec": {"nodeName": "n1"},
    }
    watcher.on_pod_change("MODIFIED", pod)
    async with asyncio.timeout(BOUND_S):
        await cluster.deleted.wait()
    watcher.close()
    assert {line["level"] for line in collector.lines} == {"info", "warning"}
    assert {line["job"] for line in collector.lines} == {"team/llm"}
