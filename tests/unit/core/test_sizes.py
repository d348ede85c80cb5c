"""spec.elasticity, and sizes at which a script turns out not to work."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.api.v1alpha1.effects import without_effect
from holdfast.orchestrator.core.actions import FinishJob, LaunchGroup
from holdfast.orchestrator.core.events import (
    AdjustRequested,
    AgainRequested,
    CollectivesBegun,
    FromNode,
    ResizeRequested,
)
from holdfast.orchestrator.core.rank_assignment import check_resize, mesh_for
from holdfast.orchestrator.core.sizes import EARLY_S, describe_elasticity
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.protocol.messages import PreemptionNoticed
from tests.unit.core.harness import SECOND, Transcript, spec

ERROR = {"code": 1, "error_type": "RuntimeError", "error_message": "world size changed"}


def elastic(elasticity: Any, low: int = 1, high: int = 4, workers: int = 2) -> dict[str, Any]:
    nodes = {"min": low, "max": high}
    return spec(nodes, workers, "auto", script=True, elasticity=elasticity)


@pytest.mark.parametrize(
    "elasticity, sizes", [("any", [1, 2, 3, 4]), ("fixed", [4]), ([2, 8], [1, 4])]
)
def test_a_generation_has_a_size_that_the_spec_allows(elasticity: Any, sizes: list[int]) -> None:
    job = job_from_mapping(elastic(elasticity))
    assert [n for n in range(1, 5) if mesh_for(job, n)] == sizes


@pytest.mark.parametrize(
    "document, text",
    [
        (elastic([4, 7, 8]), "elasticity: got 7 workers; expected multiples of workersPerNode"),
        (elastic([]), "elasticity"),
        (elastic("some"), "elasticity"),
    ],
)
def test_a_wrong_list_is_refused(document: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        job_from_mapping(document)


@pytest.mark.parametrize(
    "document, field, got",
    [
        (elastic([8, 16]), "spec.elasticity", "16 workers"),
        (elastic([2, 8], low=2), "spec.elasticity", "2 workers"),
        (elastic([4]), "spec.elasticity", "at most 4 workers"),
        (elastic("fixed", low=2), "spec.nodes.min", "2 with elasticity: fixed"),
        (elastic([8, 4, 8]), "spec.elasticity", "8 workers more than once"),
    ],
)
def test_sizes_outside_of_the_nodes_have_no_effect_and_are_refused(
    document: dict[str, Any], field: str, got: str
) -> None:
    problems = without_effect(job_from_mapping(document))
    assert [(one.field, one.got) for one in problems] == [(field, got)]


def test_a_written_minimum_below_a_fixed_size_is_refused() -> None:
    """An API server fills in nodes.min 1, which no user has chosen then."""
    job = job_from_mapping(elastic("fixed"))
    (problem,) = without_effect(job, as_written=True)
    assert (problem.field, problem.got) == ("spec.nodes.min", "1 with elasticity: fixed")
    assert without_effect(job) == []
    document = elastic("fixed")
    del document["spec"]["nodes"]["min"]
    assert without_effect(job_from_mapping(document), as_written=True) == []


def test_a_resize_to_another_size_is_refused_with_the_sizes_that_are_allowed() -> None:
    fixed, some = (job_from_mapping(elastic(e)) for e in ("fixed", [2, 8]))
    assert "elasticity is fixed" in check_resize(fixed, 2)
    assert not check_resize(fixed, 4)
    refused = check_resize(some, 3)
    assert "one of the 2, 8 workers" in refused and "use 1 or 4" in refused
    assert not check_resize(some, 1)


def started(elasticity: Any = "any", high: int = 2, step: int | None = 3) -> Transcript:
    names = [f"node-{number}" for number in range(high)]
    return Transcript(elastic(elasticity, high=high)).started(*names, step=step)


def shrunk(job: Transcript, name: str) -> None:
    """A node is lost, and no replacement comes."""
    job.lose(name)
    job.all_stopped()
    job.wait(10)


def fails(job: Transcript, error: dict[str, Any] | None = None) -> None:
    """The new generation fails before its first step."""
    job.succeed(LaunchGroup)
    job.exits(0, **(error or ERROR))
    job.all_stopped()


def world(job: Transcript) -> int:
    return job.last(LaunchGroup).membership.world_size


def test_a_fixed_job_waits_for_its_full_size() -> None:
    job = started("fixed")
    shrunk(job, "node-1")
    assert job.state.phase == "pending" and "elasticity: fixed" in job.state.reason.text
    job.join("node-9")
    assert world(job) == 4 and job.state.phase == "starting"


def test_a_shrink_uses_the_largest_size_of_the_list() -> None:
    job = started([2, 8], high=4)
    shrunk(job, "node-1")
    assert world(job) == 2
    assert "elasticity allows" not in job.state.reason.text


def test_a_script_that_fails_only_at_a_new_size_waits_for_the_old_one() -> None:
    job = started()
    shrunk(job, "node-1")
    assert world(job) == 2
    fails(job)
    assert world(job) == 2 and "tried once more" in job.state.incidents[-1].evidence
    launches = len(job.all(LaunchGroup))
    fails(job)
    assert len(job.all(LaunchGroup)) == launches and not job.all(FinishJob)
    assert "2 is not tried again" in job.state.incidents[-1].evidence
    assert any("2 is not tried again" in text for _at, text in job.state.notes)
    job.wait(100)
    text = job.state.reason.text
    assert job.state.phase == "pending"
    assert "failed with a world of 2, and works with 4" in text
    assert job.state.ledger.restarts == {"infrastructure": 1}
    job.join("node-9")
    assert world(job) == 4
    job.succeed(LaunchGroup)
    job.step(5)
    assert job.state.phase == "running"
    assert job.replayed().state == job.state


def test_after_a_failed_growth_the_job_goes_back_at_once() -> None:
    job = Transcript(elastic("any", high=2)).started("node-0", step=None)
    job.wait(30)
    job.succeed(LaunchGroup)
    job.step(1)
    assert world(job) == 2
    job.join("node-1")
    job.wait(10)
    job.all_stopped()
    assert world(job) == 4
    fails(job)
    assert world(job) == 2
    job.succeed(LaunchGroup)
    job.step(2)
    job.wait(600)
    assert world(job) == 2 and job.state.phase == "running"


def test_after_a_requested_size_fails_the_job_gets_its_old_size_back() -> None:
    job = started()
    job.apply(ResizeRequested(nodes=1))
    job.all_stopped()
    assert world(job) == 2
    fails(job)
    fails(job)
    assert job.state.target_nodes == 2
    assert "2 nodes again" in job.state.incidents[-1].evidence
    job.apply(ResizeRequested(nodes=1))
    assert job.state.target_nodes == 2
    assert "expected 4 workers: RuntimeError: world size changed" in job.state.notes[-1][1]


@pytest.mark.parametrize("step", [3, None])
def test_an_error_at_a_size_that_worked_or_before_any_has_is_the_users(step: int | None) -> None:
    job = started(step=step)
    fails(job)
    fails(job)
    assert job.one(FinishJob).reason.code == "user-error"


def test_an_error_after_a_step_at_the_new_size_is_the_users() -> None:
    job = started()
    shrunk(job, "node-1")
    job.succeed(LaunchGroup)
    job.step(4)
    for _ in range(2):
        fails(job, {**ERROR, "step": 4})
    assert job.one(FinishJob).reason.code == "user-error"


def test_a_kill_at_a_new_size_says_nothing_of_the_size() -> None:
    job = started()
    shrunk(job, "node-1")
    for _ in range(3):
        fails(job, {"signal": 9})
        assert world(job) == 2 and not job.state.sizes.refused


def test_of_many_sizes_two_are_tried() -> None:
    job = started(high=5)
    shrunk(job, "node-1")
    assert world(job) == 8
    fails(job)
    assert world(job) == 6
    fails(job)
    fails(job)
    job.wait(100)
    assert job.state.phase == "pending" and len(job.all(LaunchGroup)) == 5 + 4 + 3 + 3
    job.join("node-9")
    assert world(job) == 10


def test_a_script_that_reports_nothing_works_at_a_size_if_it_was_not_its_own_error() -> None:
    job = started(step=None)
    job.apply(CollectivesBegun(generation=1))
    shrunk(job, "node-1")
    assert job.state.sizes.worked == [4]
    job.succeed(LaunchGroup)
    # Broadcasts while the model is built are collectives too.
    job.apply(CollectivesBegun(generation=2))
    job.exits(0, **ERROR)
    job.all_stopped()
    assert job.state.sizes.failed == {2: 1}


@pytest.mark.parametrize(
    "trains, seconds, failed",
    [(False, EARLY_S + 1, {2: 1}), (False, 601.0, {}), (True, EARLY_S + 1, {})],
)
def test_an_error_long_after_the_launch_is_a_matter_of_the_size_while_the_script_still_loads(
    trains: bool, seconds: float, failed: dict[int, int]
) -> None:
    """A checkpoint of 70B parameters is read for minutes. The first generation was seen to train,
    so the second, which begins no collective, does not; recovery.startupTimeoutSeconds is 600."""
    job = started(step=None)
    job.apply(CollectivesBegun(generation=1))
    shrunk(job, "node-1")
    job.succeed(LaunchGroup)
    if trains:
        job.apply(CollectivesBegun(generation=2))
    job.now_ns += round(seconds * SECOND)
    job.exits(0, **ERROR)
    job.all_stopped()
    assert job.state.sizes.failed == failed
    assert job.state.ledger.restarts.get("user", 0) == (0 if failed else 1)


def test_without_any_sign_of_training_an_error_is_early_for_two_minutes() -> None:
    job = started(step=None)
    job.now_ns = job.state.group.launched_ns + round(EARLY_S * SECOND)
    shrunk(job, "node-1")
    assert job.state.sizes.worked == [4]
    job.succeed(LaunchGroup)
    job.now_ns += round((EARLY_S + 1) * SECOND)
    job.exits(0, **ERROR)
    job.all_stopped()
    assert not job.state.sizes.failed and job.state.ledger.restarts["user"] == 1


def test_a_running_job_follows_a_changed_list_of_sizes() -> None:
    job = started("fixed")
    settings = {"min_nodes": 1, "spares": 0, "recovery": {}}
    job.apply(AdjustRequested(**settings, elasticity=(2, 4)))
    shrunk(job, "node-1")
    assert world(job) == 2
    job.apply(AdjustRequested(**settings))
    assert job.state.job.spec.elasticity == (2, 4)


def test_a_script_that_reports_nothing_works_at_a_size_that_it_leaves_for_another_reason() -> None:
    for leaves in (ResizeRequested(nodes=1), FromNode("node-1", PreemptionNoticed(grace_s=30.0))):
        job = started(step=None)
        job.apply(CollectivesBegun(generation=1))
        job.apply(leaves)
        job.wait(40)
        job.all_stopped()
        assert job.state.sizes.worked == [4], leaves


@pytest.mark.parametrize("seconds, worked", [(EARLY_S - 1, []), (EARLY_S, [4])])
def test_a_script_without_any_sign_works_at_a_size_at_which_it_ran_long(
    seconds: float, worked: list[int]
) -> None:
    job = started(step=None)
    job.now_ns = job.state.group.launched_ns + round(seconds * SECOND)
    job.apply(ResizeRequested(nodes=1))
    job.all_stopped()
    assert job.state.sizes.worked == worked


def test_each_generation_of_a_script_that_reports_nothing_shows_its_own_size() -> None:
    job = started(step=None)
    job.apply(CollectivesBegun(generation=1))
    shrunk(job, "node-1")
    job.succeed(LaunchGroup)
    job.lose("node-0")
    job.all_stopped()
    assert job.state.sizes.worked == [4], "the second began nothing"


def test_a_mistake_that_no_size_mends_is_the_users() -> None:
    job = started()
    shrunk(job, "node-1")
    fails(job, {"code": 1, "error_type": "WrongModel", "error_message": "other shapes"})
    assert not job.state.sizes.failed and job.one(FinishJob).reason.code == "user-error"


def test_a_size_that_failed_once_and_then_works_is_like_any_other() -> None:
    job = started()
    shrunk(job, "node-1")
    fails(job)
    assert job.state.sizes.failed == {2: 1}
    job.succeed(LaunchGroup)
    job.step(4)
    assert job.state.sizes.failed == {} and sorted(job.state.sizes.worked) == [2, 4]
    job.step(5)
    assert sorted(job.state.sizes.worked) == [2, 4]


def test_new_code_may_work_where_the_old_one_did_not() -> None:
    job = started()
    shrunk(job, "node-1")
    fails(job)
    fails(job)
    assert list(job.state.sizes.refused) == [2] and job.state.phase != "running"
    job.apply(AgainRequested(by="ann"))
    assert not job.state.sizes.refused and not job.state.sizes.failed
    assert "ann" in job.state.notes[-1][1] and "new code" in job.state.notes[-1][1]


def test_what_a_job_waits_for_names_its_elasticity() -> None:
    texts = [describe_elasticity(job_from_mapping(elastic(e))) for e in ("any", "fixed", [2, 8])]
    assert texts == [
        "",
        "; all 4 are needed with elasticity: fixed",
        "; elasticity allows 2, 8 workers",
    ]
