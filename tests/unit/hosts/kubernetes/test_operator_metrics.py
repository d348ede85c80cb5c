"""/metrics of the operator: what it says of many jobs, of those without a controller and of itself,
how many series that is, and the page about all of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.hosts.kubernetes.metrics import OperatorState, exposition
from holdfast.orchestrator.hosts.kubernetes.metrics_page import LEAST, MOST, page
from holdfast.orchestrator.hosts.kubernetes.status import TAKING_UP, ConditionState, state_of
from holdfast.orchestrator.hosts.local.replay import replay
from holdfast.orchestrator.runtime.observe.prometheus import JobCollector, build_labels
from holdfast.orchestrator.runtime.observe.view import CheckpointView, JobView
from tests.sim.host import _DECODER as SIM_RECORD
from tests.sim.run_seed import play

Key = tuple[str, str]
Labels = frozenset[tuple[str, str]]
SEEDS = (3, 8, 21)


@functools.cache
def lived(seed: int) -> tuple[TrainingJob, JobView]:
    """A job in the middle of a simulated life: it has been interrupted, and trains."""
    world = play(seed)
    records = [Record(*SIM_RECORD.decode(line)) for line in world.host.journal]
    for end in range(len(records), 0, -1):
        story = replay(world.host.job, records[:end])
        view = story.view(story.now_ns, live=False)
        if view.state == "running" and view.num_incidents:
            return world.host.job, view
    raise AssertionError(f"seed {seed} never trains after an interruption")


def facts(views: dict[Key, JobView], **others: Any) -> OperatorState:
    return OperatorState(
        **{"leading": True, "requests": {}, "views": views, "states": {}, **others}
    )


def samples(families: Any) -> dict[tuple[str, Labels], float]:
    """(name, labels) -> value; none is there twice."""
    found: dict[tuple[str, Labels], float] = {}
    family: Metric
    for family in families:
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found, key
            found[key] = one.value
    return found


def scrape(told: OperatorState) -> dict[tuple[str, Labels], float]:
    return samples(text_string_to_metric_families(exposition(told).decode()))


def of(found: dict[tuple[str, Labels], float], key: Key) -> dict[tuple[str, Labels], float]:
    """What is said of one job, without its namespace."""
    where = ("namespace", key[0])
    return {
        (name, labels - {where}): value
        for (name, labels), value in found.items()
        if {where, ("job", key[1])} <= labels
    }


def test_of_each_job_it_says_what_the_job_itself_would_say() -> None:
    views = {("red", f"job-{seed}"): lived(seed)[1] for seed in SEEDS}
    views["blue", "job-3"] = lived(SEEDS[1])[1]  # the name of one in another namespace
    found = scrape(facts(views))
    for key, view in views.items():
        collector = JobCollector(named(key[1]), lambda view=view: view)  # type: ignore[misc]
        own = samples(collector.collect())
        build = [one for one in own if one[0] == "holdfast_build_info"]
        assert len(build) == 1
        assert of(found, key) == {one: own[one] for one in own if one not in build}


def named(name: str) -> TrainingJob:
    spec = {"entrypoint": {"script": "train.py"}}
    return job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


def test_there_is_no_series_per_rank_or_node() -> None:
    views = {("red", "one"): lived(SEEDS[0])[1]}
    assert views["red", "one"].nodes
    for _name, labels in scrape(facts(views)):
        assert not {"rank", "node"} & {name for name, _value in labels}


def test_it_says_of_itself_which_build_it_is_whether_it_leads_and_what_it_asks() -> None:
    requests = {("get", "pods"): 7, ("watch", "pods"): 1}
    found = scrape(facts({("red", "one"): lived(SEEDS[0])[1]}, requests=requests))
    assert found["holdfast_build_info", frozenset(build_labels().items())] == 1
    assert found["holdfast_operator_leader", frozenset()] == 1
    assert found["holdfast_operator_jobs", frozenset()] == 1
    asked = frozenset({("verb", "get"), ("resource", "pods")})
    assert found["holdfast_operator_api_requests_total", asked] == 7
    idle = scrape(facts({}, leading=False))
    assert idle["holdfast_operator_leader", frozenset()] == 0
    assert idle["holdfast_operator_jobs", frozenset()] == 0
    assert ("holdfast_build_info", frozenset(build_labels().items())) in idle


def test_a_job_without_a_controller_has_one_series_its_state() -> None:
    states = {("red", "ended"): "failed", ("red", "held"): "suspended", ("blue", "x"): "pending"}
    found = scrape(facts({("red", "one"): lived(SEEDS[0])[1]}, states=states))
    for key, state in states.items():
        assert of(found, key) == {
            ("holdfast_job_state", frozenset({("job", key[1]), ("state", state)})): 1.0
        }
    assert found["holdfast_operator_jobs", frozenset()] == 1


def test_what_jobs_cost_in_series_is_what_the_docs_say() -> None:
    nothing = len(scrape(facts({})))
    for seed in SEEDS:
        view = lived(seed)[1]
        assert LEAST <= len(of(scrape(facts({("red", "one"): view})), ("red", "one"))) <= MOST
    new, full = JobView(name="x"), everything(lived(SEEDS[0])[1])
    assert len(scrape(facts({("red", "one"): new}))) - nothing == LEAST
    assert len(scrape(facts({("red", "one"): full}))) - nothing == MOST
    many = {("red", f"job-{number}"): full for number in range(100)}
    ended = {("red", f"old-{number}"): "succeeded" for number in range(1000)}
    assert len(scrape(facts(many, states=ended))) - nothing == 100 * MOST + 1000


def everything(view: JobView) -> JobView:
    """As a job on GPUs that reports all that there is."""
    return msgspec.structs.replace(
        view, loss=1.0, step_s=0.5, tokens_per_s=1.0, mfu=0.5, device_memory_peak_bytes=1,
        durable_s=1.0, first_step_s=1.0,
        nodes=[msgspec.structs.replace(node, heartbeat_age_s=0.1) for node in view.nodes],
        checkpoints=[CheckpointView(step=1, generation=1, num_bytes=1, committed_ns=1)],
    )  # fmt: skip


def test_a_job_that_is_not_taken_up_yet_is_what_its_object_says() -> None:
    assert state_of({"status": {"state": "failed"}}, TAKING_UP) == "failed"
    assert state_of({}, TAKING_UP) == "pending"
    refused = ConditionState("failed", "InvalidSpec", "spec.image: got nothing")
    assert state_of({"status": {"state": "running"}}, refused) == "failed"


def test_the_page_of_the_metrics_is_up_to_date() -> None:
    stored = Path(__file__).parents[4] / "docs/operations/metrics.md"
    fix = (
        "python -m holdfast.orchestrator.hosts.kubernetes.metrics_page > docs/operations/metrics.md"
    )
    assert stored.read_text() == page(), fix
