"""The page of jobs without a browser: what it shows, and whom it serves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `ui` is not installed")

from holdfast.orchestrator.ui import charts, pages

from .views import HTML, FakeTarget, Served, served, view


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(view(), view("big", 128, 8), view("alone", controller_alive=False))


@pytest.fixture(scope="module")
def page(target: FakeTarget) -> Iterator[Served]:
    with served(target) as page:
        yield page


# -- what it shows ------------------------------------------------------------------------------
def test_each_section_shows_its_part_of_the_view() -> None:
    sections = pages.job_sections(view())
    shown = {name: re.sub(r"<[^>]*>", " ", html) for name, html in sections.items()}
    assert "501 of 1000 steps, 1 min 40 s left" in shown["head"] and "2.5000" in shown["head"]
    assert "productive  90.0%" in shown["time"] and "waiting  10.0%" in shown["time"]
    assert shown["charts"].count("loss") == 1 and "tokens/s" not in shown["charts"]
    assert sections["charts"].count('class="mark"') == 2, "an incident in both charts"
    assert "next step after 7.20 s, 3 steps lost" in shown["incidents"]
    for phase in ("detect  1.00 s", "place  0.20 s", "launch  1.50 s", "first-step  4.00 s"):
        assert phase in shown["incidents"]
    assert "generation 1, 4 ranks, until" in shown["nodes"]
    assert "3 running, 1 hung" in shown["nodes"] and "3 hung" in shown["nodes"]
    assert "rank 3: hung, 491 steps, 3.0 GiB" in sections["nodes"]
    assert "after 500 steps, 1 step old" in shown["checkpoints"] and sections["plan"] == ""


def test_nodes_with_trouble_come_first_in_a_large_job() -> None:
    html = pages.job_sections(view("big", 128, 8))["nodes"]
    assert html.index("node-127") < html.index("node-0") and html.count('class="rank ') == 1024


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        ("running", ["checkpoint", "suspend", "resize", "cancel"]),
        ("pending", ["suspend", "resize", "cancel"]),
        ("suspended", ["resume", "cancel"]),
        ("failed", []),
    ],
)
def test_a_job_offers_the_requests_that_its_state_allows(state: str, verbs: list[str]) -> None:
    html = pages.job_sections(view(state=state))["actions"]
    assert re.findall('data-dialog="do-(.*?)"', html) == verbs


def test_a_reader_without_a_right_gets_no_button_that_needs_it() -> None:
    target = FakeTarget(view())
    target.missing = {"resize": "patch trainingjobs/scale", "cancel": "patch trainingjobs"}
    with served(target) as page:
        html = page.text("/jobs/llm")
    assert re.findall('data-dialog="do-(.*?)"', html) == ["checkpoint", "suspend"]
    assert "lacks a right: patch trainingjobs/scale, patch trainingjobs." in html


def test_a_line_ends_at_an_incident_and_ignores_numbers_that_are_not_finite() -> None:
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, 3.0), (4.0, 2.0)]
    chart = charts.line("loss", points, [charts.Mark(3.0, HTML)], str)
    assert chart is not None and (chart.low, chart.high, chart.newest) == ("1.0", "3.0", "2.0")
    (path,) = re.findall('class="line" d="(.*?)"', chart.svg)
    assert re.sub(r"[^ML]", "", path) == "MLM" and HTML not in chart.svg
    assert charts.line("loss", points[:1], [], str) is None


def test_the_report_is_one_file_whose_policy_allows_nothing_else(tmp_path: Path) -> None:
    html = pages.report_html(view(), "holdfast status llm --report")
    assert HTML not in html and "onerror=alert(1)&gt;" in html
    assert not re.findall(r"<\w[^<>]*\s(?:src|href|action|style|on\w+)=|url\(|@import|<link", html)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert f"{rule} '{pages._hash(text)}'" in policy
    assert policy.startswith("default-src 'none'") and len(html) < 200_000


# -- whom it serves -----------------------------------------------------------------------------
def test_the_url_with_the_token_gives_a_cookie_and_hides_the_token(page: Served) -> None:
    answer = page.ask("GET", "/?token=a-token", Cookie="")
    assert answer.status == 303 and answer.headers["Location"] == "/"
    assert "HttpOnly; Path=/; SameSite=strict" in answer.headers["Set-Cookie"]
    assert "llm" in page.text("/")


def test_without_the_token_nothing_is_shown(page: Served) -> None:
    for path in ("/", "/live", "/jobs/llm", "/static/page.js", "/?token=wrong", "/jobs/llm/logs"):
        for cookie in ("", "holdfast=a-token", f"holdfast-{page.port}=a-toke"):
            answer = page.ask("GET", path, Cookie=cookie)
            assert answer.status == 403 and b"llm" not in answer.read()


def test_another_name_of_this_machine_is_rejected(page: Served) -> None:
    """A page elsewhere can have a name that resolves to this machine."""
    answer = page.ask("GET", "/", Host=f"evil.example:{page.port}")
    assert answer.status == 403


def test_a_change_needs_a_post_from_this_page(page: Served, target: FakeTarget) -> None:
    verbs = ("suspend", "cancel", "resize", "checkpoint", "resume", "stacks", "profile")
    for verb in verbs:
        assert page.ask("GET", f"/jobs/llm/{verb}").status == 405
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{page.port + 1}"):
            assert page.ask("POST", f"/jobs/llm/{verb}", Origin=origin).status == 403
        assert page.ask("POST", f"/jobs/llm/{verb}").status == 403
        other = page.ask("POST", f"/jobs/llm/{verb}", Origin=page.url, Cookie="")
        assert other.status == 403
    assert target.requests == []
    answer = page.ask("POST", "/jobs/llm/resize", "nodes=3", Origin=page.url)
    assert (answer.status, answer.read()) == (200, b"resize is under way")
    assert target.requests == [("llm", "resize", {"nodes": 3})]
    wrong = [("resize", "nodes=-1"), ("resize", f"nodes={10**30}")]
    for verb, body in (*wrong, ("profile", "rank=0&seconds=900")):
        assert page.ask("POST", f"/jobs/llm/{verb}", body, Origin=page.url).status == 400
    assert page.ask("POST", "/jobs/llm/chaos", Origin=page.url).status == 404
    target.requests.clear()


def test_every_answer_has_the_policy(page: Served) -> None:
    for path in ("/", "/jobs/llm", "/jobs/none", "/static/page.css", "/none", "/?token=x"):
        policy = page.ask("GET", path).headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
    html = page.text("/jobs/llm")
    assert not re.findall(r"<\w[^<>]*\s(?:style|on\w+)=|<script>|<style>", html)


def test_html_in_a_name_and_in_an_exception_stays_text(page: Served) -> None:
    assert HTML not in page.text("/jobs/llm") and HTML not in page.text(f"/jobs/{HTML[:4]}")


# -- bad input ----------------------------------------------------------------------------------
def test_the_page_names_what_a_person_can_do(page: Served, target: FakeTarget) -> None:
    assert "`holdfast status` lists those that do" in page.text("/jobs/none")
    alone = page.text("/jobs/alone")
    assert "unattended" in alone and "holdfast attach llm" in alone
    with served(FakeTarget()) as empty:
        assert "no jobs; start one with holdfast run FILE" in empty.text("/")


def test_a_job_that_goes_away_while_it_is_looked_at_keeps_its_last_state() -> None:
    target = FakeTarget(view("gone"))
    with served(target) as page:
        answer = page.ask("GET", "/jobs/gone/live")
        first = b"".join(answer.readline() for _ in range(2))
        assert b"event: section" in first
        target.refusal = "job gone: the journal cannot be read; `holdfast delete gone`"
        line = b""
        while b"event: problem" not in line:
            line = answer.readline()
        assert b"holdfast delete gone" in answer.readline()
        answer.close()


def test_ten_viewers_read_a_job_as_often_as_one() -> None:
    target, began = FakeTarget(view()), threading.Barrier(10)

    def look(page: Served) -> None:
        answer = page.ask("GET", "/jobs/llm/live")
        began.wait(20)
        for _ in range(2):
            answer.readline()
        answer.close()

    with served(target) as page:
        viewers = [threading.Thread(target=look, args=(page,)) for _ in range(10)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join(30)
        assert target.reads <= 2, "one read serves all that look within a second"
