"""/metrics of the operator: metrics of many jobs, of jobs without a controller and of the operator
itself, the number of series, and the page that documents them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.hosts.kubernetes.metrics import OperatorState, exposition
from holdfast.orchestrator.hosts.kubernetes.status import ACCEPTED, ConditionState, state_of
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.prometheus import JobCollector, build_labels
from holdfast.orchestrator.runtime.observe.view import CheckpointView, JobView
from tests.documents import job_document
from tests.sim.run_seed import play
from tools.metrics_page import LEAST, MOST, page

Key = tuple[str, str]
Labels = frozenset[tuple[str, str]]
SEEDS = (3, 8, 21)


@functools.cache
def simulated(seed: int) -> tuple[TrainingJob, JobView]:
    """A job of the simulation that trains after an interruption."""
    world = play(seed)
    records = world.host.history()
    for end in range(len(records), 0, -1):
        story = replay(world.host.job, records[:end])
        view = story.view(story.now_ns, live=False)
        if view.state == "running" and view.num_incidents:
            return world.host.job, view
    raise AssertionError(f"seed {seed} never trains after an interruption")


def operator_state(views: dict[Key, JobView], **others: Any) -> OperatorState:
    return OperatorState(
        **{"leading": True, "requests": {}, "views": views, "states": {}, **others}
    )


def samples(families: Any) -> dict[tuple[str, Labels], float]:
    """(name, labels) -> value; fails on duplicates."""
    found: dict[tuple[str, Labels], float] = {}
    family: Metric
    for family in families:
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found, key
            found[key] = one.value
    return found


def scrape(state: OperatorState) -> dict[tuple[str, Labels], float]:
    return samples(text_string_to_metric_families(exposition(state).decode()))


def of(found: dict[tuple[str, Labels], float], key: Key) -> dict[tuple[str, Labels], float]:
    """The samples of one job, without the label namespace."""
    where = ("namespace", key[0])
    return {
        (name, labels - {where}): value
        for (name, labels), value in found.items()
        if {where, ("job", key[1])} <= labels
    }


def test_metrics_of_a_job_are_the_same_as_on_its_own_endpoint() -> None:
    views = {("red", f"job-{seed}"): simulated(seed)[1] for seed in SEEDS}
    views["blue", "job-3"] = simulated(SEEDS[1])[1]  # the name of one in another namespace
    found = scrape(operator_state(views))
    for key, view in views.items():
        collector = JobCollector(named(key[1]), lambda view=view: view)  # type: ignore[misc]
        own = samples(collector.collect())
        build = [one for one in own if one[0] == "holdfast_build_info"]
        assert len(build) == 1
        assert of(found, key) == {one: own[one] for one in own if one not in build}


def named(name: str) -> TrainingJob:
    spec = {"entrypoint": {"script": "train.py"}}
    return job_from_mapping(job_document(name, spec))


def test_there_is_no_series_per_rank_or_node() -> None:
    views = {("red", "one"): simulated(SEEDS[0])[1]}
    assert views["red", "one"].nodes
    for _name, labels in scrape(operator_state(views)):
        assert not {"rank", "node"} & {name for name, _value in labels}


def test_the_operator_exports_its_build_its_leadership_and_its_requests() -> None:
    requests = {("get", "pods"): 7, ("watch", "pods"): 1}
    found = scrape(operator_state({("red", "one"): simulated(SEEDS[0])[1]}, requests=requests))
    assert found["holdfast_build_info", frozenset(build_labels().items())] == 1
    assert found["holdfast_operator_leader", frozenset()] == 1
    assert found["holdfast_operator_jobs", frozenset()] == 1
    labels = frozenset({("verb", "get"), ("resource", "pods")})
    assert found["holdfast_operator_api_requests_total", labels] == 7
    idle = scrape(operator_state({}, leading=False))
    assert idle["holdfast_operator_leader", frozenset()] == 0
    assert idle["holdfast_operator_jobs", frozenset()] == 0
    assert ("holdfast_build_info", frozenset(build_labels().items())) in idle


def test_a_job_without_a_controller_has_one_series_for_its_state() -> None:
    states = {
        ("red", "ended"): "failed",
        ("red", "suspended"): "suspended",
        ("blue", "x"): "pending",
    }
    found = scrape(operator_state({("red", "one"): simulated(SEEDS[0])[1]}, states=states))
    for key, state in states.items():
        assert of(found, key) == {
            ("holdfast_job_state", frozenset({("job", key[1]), ("state", state)})): 1.0
        }
    assert found["holdfast_operator_jobs", frozenset()] == 1


def test_the_number_of_series_of_a_job_is_the_documented_one() -> None:
    nothing = len(scrape(operator_state({})))
    for seed in SEEDS:
        view = simulated(seed)[1]
        assert (
            LEAST <= len(of(scrape(operator_state({("red", "one"): view})), ("red", "one"))) <= MOST
        )
    new = JobView(name="x")
    assert len(scrape(operator_state({("red", "one"): new}))) - nothing == LEAST
    # A job of one rank sends nothing, so it has one series less.
    full = max((everything(simulated(seed)[1]) for seed in SEEDS), key=lambda view: view.world_size)
    assert len(scrape(operator_state({("red", "one"): full}))) - nothing == MOST
    many = {("red", f"job-{number}"): full for number in range(100)}
    ended = {("red", f"old-{number}"): "succeeded" for number in range(1000)}
    assert len(scrape(operator_state(many, states=ended))) - nothing == 100 * MOST + 1000


def everything(view: JobView) -> JobView:
    """The view of a job on GPUs that reports every value."""
    return msgspec.structs.replace(
        view, loss=1.0, step_s=0.5, tokens_per_s=1.0, mfu=0.5, device_memory_peak_bytes=1,
        sent_bytes=1, durable_s=1.0, first_step_s=1.0,
        nodes=[msgspec.structs.replace(node, heartbeat_age_s=0.1) for node in view.nodes],
        checkpoints=[CheckpointView(step=1, generation=1, num_bytes=1, committed_ns=1)],
    )  # fmt: skip


def test_a_job_that_is_not_started_yet_has_the_state_of_its_object() -> None:
    assert state_of({"status": {"state": "failed"}}, ACCEPTED) == "failed"
    assert state_of({}, ACCEPTED) == "pending"
    refused = ConditionState("pending", "InvalidSpec", "spec.image: got nothing", accepted=False)
    assert state_of({"status": {"state": "running"}}, refused) == "pending"


def test_the_page_about_metrics_is_up_to_date() -> None:
    stored = Path(__file__).parents[4] / "docs/operations/metrics.md"
    fix = "python -m tools.metrics_page > docs/operations/metrics.md"
    assert stored.read_text() == page(), fix
