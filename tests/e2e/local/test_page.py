"""The page of jobs in a real browser: a real job with a killed worker and node, and a large one.

HOLDFAST_SCREENSHOTS=docs/images writes the pictures that the documentation shows.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ray.browser import program
from tests.unit.ui.views import HTML, FakeTarget, eventually, served, view

from .local_rig import ENDLESS, Job, holdfast, spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BOUND_MS = 60_000
NAME = "watched"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = program()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=words)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def job(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job with two incidents that goes on."""
    job = Job(tmp_path_factory.mktemp("page"), spec(NAME, ENDLESS))
    job.run()
    try:
        job.running(incidents=0)
        job.kill(job.worker_pids()[1])
        job.running(incidents=1)
        job.kill(job.agent_pid("node-1"))
        job.running(incidents=2)
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def url(job: Job) -> Iterator[str]:
    """The URL that `holdfast ui` prints."""
    command = subprocess.Popen(
        [sys.executable, "-m", "holdfast.orchestrator.cli.main", "ui", "--home", str(job.home)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": ""},
    )  # fmt: skip
    try:
        assert command.stderr is not None
        (found,) = re.findall(r"http://\S+", command.stderr.readline())
        yield found
    finally:
        command.terminate()
        command.wait(30)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose errors, also those against its policy, fail the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(BOUND_MS)
    errors: list[str] = []
    page.on("console", lambda one: errors.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def opened(page: Any, url: str, name: str = NAME) -> None:
    page.goto(url)
    page.get_by_role("link", name=name).click()
    page.locator("#link", has_text="live").wait_for()


def picture(page: Any, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("HOLDFAST_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"{name}.png", full_page=True)


def test_the_list_shows_the_job_and_filters(page: Any, url: str, tmp_path: Path) -> None:
    page.goto(url)
    assert "token" not in page.url
    row = page.get_by_role("row", name=NAME)
    assert "running" in row.inner_text() and "this machine" in row.inner_text()
    page.get_by_label("filter jobs").fill("other")
    assert not row.is_visible()
    page.get_by_label("filter jobs").fill("running")
    assert row.is_visible()


def test_each_section_shows_the_job_and_follows_it(page: Any, url: str, tmp_path: Path) -> None:
    transferred: list[int] = []
    page.on("response", lambda one: transferred.append(int(one.headers.get("content-length", 0))))
    opened(page, url)
    text = {name: page.locator(f"#{name}").inner_text() for name in
            ("head", "time", "charts", "incidents", "nodes", "checkpoints", "plan")}  # fmt: skip
    assert sum(transferred) < 2**20
    assert "running" in text["head"] and "tokens/s" in text["head"]
    assert "productive" in text["time"] and "recovering" in text["time"]
    assert "loss" in text["charts"] and page.locator("#charts .mark").count() >= 2
    assert "was killed by SIGKILL" in text["incidents"] and "node-1 was lost" in text["incidents"]
    assert "restored from memory" in text["incidents"]
    assert "generation 3" in text["nodes"] and "4 running" in text["nodes"]
    assert "memory" in text["checkpoints"] and "moments" in text["plan"]
    before = text["head"]
    page.wait_for_function("old => document.getElementById('head').innerText !== old", arg=before)
    page.locator("#incident-1 summary").click()
    page.locator("#incident-1").locator("li", has_text="first-step").wait_for()
    page.wait_for_timeout(2500)  # sections are replaced every second
    assert page.locator("#incident-1").locator("li", has_text="first-step").is_visible(), (
        "it stays open"
    )
    picture(page, "page-job", tmp_path)


def test_logs_events_and_stacks_on_demand(page: Any, url: str) -> None:
    opened(page, url)
    page.locator("#logs button").click()
    page.locator("#logs pre", has_text="step 0 loss").wait_for()
    page.locator("#events button").click()
    page.locator("#events pre", has_text="launch").wait_for()
    page.get_by_label("filter events").fill("sigkill")
    lines = page.locator("#events pre").inner_text().lower().splitlines()
    assert lines and all("sigkill" in line for line in lines)
    page.get_by_role("button", name="stacks of all ranks").click()
    page.locator("#stacks pre", has_text="rank").wait_for()


def test_the_keyboard_is_enough_to_ask_for_a_checkpoint(page: Any, url: str, job: Job) -> None:
    opened(page, url)
    commits = job.until(lambda view: view.state == "running").commits
    page.get_by_role("button", name="checkpoint now").focus()
    for key in ("Enter", "Escape"):
        page.keyboard.press(key)
    assert not page.locator("dialog[open]").count(), "a look changes nothing"
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('answer').textContent")
    job.until(lambda view: view.commits > commits)


def test_a_section_that_changes_keeps_focus_scroll_and_a_chosen_text(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    opened(page, url)
    page.locator("#nodes .scroll").focus()
    page.evaluate("document.querySelector('#nodes .scroll').scrollLeft = 60")
    page.wait_for_timeout(3500)  # sections are replaced every second
    assert page.evaluate("document.activeElement.ariaLabel") == "nodes"
    assert page.evaluate("document.querySelector('#nodes .scroll').scrollLeft") == 60
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#head h1'))")
    page.wait_for_timeout(2500)
    assert page.evaluate("String(getSelection())") == NAME


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 400)])
def test_no_rule_of_accessibility_is_broken(
    browser: Any, url: str, scheme: Any, width: int, tmp_path: Path
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    # Its script is not of the page, whose policy rejects it.
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True
    )
    page = context.new_page()
    page.set_default_timeout(BOUND_MS)
    opened(page, url)
    page.locator("#incident-1 summary").click()
    for _ in range(2):
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        picture(page, f"page-{scheme}-{width}", tmp_path)
        page.goto(url)
    context.close()


def test_1024_ranks_and_texts_with_html_are_drawn(page: Any, tmp_path: Path) -> None:
    with served(FakeTarget(view("large", 128, 8, reason=HTML))) as large:
        opened(page, large.entrance, "large")
        assert page.locator(".rank").count() == 1024
        assert "1023 running, 1 hung" in page.locator("#nodes").inner_text()
        assert (
            page.locator("main img").count() == 0
            and HTML in page.locator("#incidents").inner_text()
        )
        page.reload()
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        page.wait_for_function(paint)
        drawn = "performance.getEntriesByType('navigation')[0].domComplete"
        print(f"first paint {page.evaluate(paint):.0f} ms, drawn {page.evaluate(drawn):.0f} ms")
        picture(page, "page-large", tmp_path)
        page.goto("about:blank")


def test_the_report_is_one_file_that_a_browser_shows_without_a_network(
    page: Any, job: Job, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    done = holdfast(job, "status", NAME, "--html", str(file))
    assert done.returncode == 0, done.stderr
    requests: list[str] = []
    page.on("request", lambda one: requests.append(one.url))
    page.goto(file.as_uri())
    assert requests == [file.as_uri()]
    assert "node-1 was lost" in page.locator("#incidents").inner_text()
    chart = page.locator("[data-chart]").first
    chart.locator("svg").hover()
    assert " at " in chart.locator("output").inner_text(), "its own script runs"


def test_the_page_beside_a_run_ends_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path, spec("short", 3))
    job.run(str(job.file), "--ui")
    assert job.wait().state == "succeeded"
    job.command.wait(60)
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", job.output())
    eventually(lambda: socket.socket().connect_ex(("127.0.0.1", int(port))) != 0)


def test_open_pages_do_not_disturb_a_job(job: Job, url: str, browser: Any) -> None:
    """The pages read it once a second together; printed beside the pace without them."""

    def pace() -> float:
        first = job.until(lambda view: view.state == "running")
        last = job.until(lambda view: view.step >= first.step + 8)
        return (last.now_ns - first.now_ns) / 1e9 / (last.step - first.step)

    alone = pace()
    pages = [browser.new_page() for _ in range(5)]  # a browser has six connections for an address
    for page in pages:
        opened(page, url)
    seen = pace()
    print(f"{alone:.3f} s a step alone, {seen:.3f} s with five pages")
    assert job.until(lambda view: view.step > 0).num_incidents == 2, "nothing was lost"
    for page in pages:
        page.close()
