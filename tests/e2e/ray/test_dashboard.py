"""A job in Ray's dashboard as a user sees it, in a real browser."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from . import browser, cluster_rig
from .browser import Browser
from .jobs import BOUND_S, Submitted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NAME = "watched"
PAUSE_S = 0.5
"""Ray collects task events once a second."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    browser.program()  # first: it skips before a cluster is started
    size = {"min": 2, "max": 2}  # the first generation has all ranks
    job = Submitted(tmp_path_factory.mktemp("ray"), NAME, 1_000_000, nodes=size)
    try:
        job.running()
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def seen(job: Submitted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(
        cluster_rig.shared().dashboard, tmp_path_factory.mktemp("pictures")
    ) as seen:
        yield seen


def test_the_jobs_view_shows_the_jobs_name_and_its_placement_groups(
    job: Submitted, seen: Browser
) -> None:
    seen.open("jobs")
    seen.page.get_by_label("Name").first.fill(NAME)  # drivers of other tests are not shown
    row = seen.row("RUNNING")
    assert job.info().submission_id in row and NAME in row.split()
    seen.picture("ray-jobs")
    seen.open(f"jobs/{job.info().job_id}")
    seen.page.get_by_text("Placement Group Table").click()
    for node in job.members():
        assert "CREATED" in seen.row(f"{NAME}/{node}")
    groups = seen.page.get_by_text("Placement Group Table").locator("../..")
    groups.scroll_into_view_if_needed()
    seen.picture("ray-placement-groups")


def test_the_list_of_tasks_has_requests_and_no_watch_calls(job: Submitted) -> None:
    from ray.util.state import list_tasks

    step = job.view().step
    job.until(lambda view: view.step > step)  # calls status and watch
    give_up, verbs = time.monotonic() + BOUND_S, set[str]()
    own = f"HoldfastController({NAME})."  # of tasks that have started
    while "perform" not in verbs and time.monotonic() < give_up:
        found = list_tasks(address=cluster_rig.shared().dashboard, limit=10_000)
        verbs = {task.name.removeprefix(own) for task in found if task.name.startswith(own)}
        time.sleep(PAUSE_S)
    assert "perform" in verbs and "watch" not in verbs


def test_the_actors_view_shows_controller_and_nodes_with_state_and_restarts(
    job: Submitted, seen: Browser
) -> None:
    before = job.view().controller_restarts
    os.kill(job.controller()["pid"], signal.SIGKILL)
    job.until(lambda view: view.controller_restarts > before and view.state == "running")
    pid = str(job.controller()["pid"])
    seen.open("actors")
    seen.page.get_by_label("Name").first.fill(NAME)
    controller = seen.row(f"HoldfastController({NAME})", "ALIVE", pid)
    columns = [name.strip() for name in seen.page.locator("thead").inner_text().split("\t")]
    cells = [cell.strip() for cell in controller.split("\t")]
    assert cells[columns.index("Name")] == f"holdfast/{NAME}"
    assert cells[columns.index("Restarted")] == "1"
    for node in job.members():
        cells = [c.strip() for c in seen.row(f"HoldfastAgent({NAME} {node})").split("\t")]
        assert cells[columns.index("Name")] == f"{NAME}-{node}"
        assert cells[columns.index("State")] == "ALIVE"
        assert cells[columns.index("Restarted")] == "0"


def test_a_lost_node_stays_in_the_actors_view_beside_its_successor(
    job: Submitted, seen: Browser
) -> None:
    members, before = job.members(), job.running().num_incidents
    lost = members[-1]
    os.kill(job.facts(lost)["actor_pid"], signal.SIGKILL)
    job.incident_after(before)
    job.running()
    (new,) = set(job.members()) - set(members)
    seen.open("actors")
    seen.page.get_by_label("Name").first.fill(NAME)
    row = seen.row(f"HoldfastAgent({NAME} {lost})", "DEAD")
    columns = [name.strip() for name in seen.page.locator("thead").inner_text().split("\t")]
    assert [cell.strip() for cell in row.split("\t")][columns.index("Restarted")] == "0"
    assert "worker process has died" in row
    seen.row(f"HoldfastAgent({NAME} {new})", "ALIVE")
    seen.picture("ray-actors")
    seen.page.locator("th").filter(has_text="Exit Detail").scroll_into_view_if_needed()
    seen.picture("ray-actors-restarted")


def test_the_log_view_shows_a_workers_log_by_its_rank(job: Submitted, seen: Browser) -> None:
    facts = job.facts(job.members()[0])
    seen.open(f"logs?nodeId={facts['ray_node']}")
    seen.page.get_by_role("link", name=re.compile(f"^holdfast-{NAME}-[0-9a-f]{{6}}\\b")).click()
    seen.shows("controller.log")
    seen.shows(f"agent-{job.members()[0]}.log")
    seen.page.get_by_role("link", name=re.compile("gen-0001")).click()
    for rank in range(4):
        seen.shows(f"rank-0000{rank}.log")
    seen.page.get_by_text("rank-00000.log").click()
    seen.shows("parameters")
    seen.picture("ray-worker-log")
