"""A writer of checkpoints that is stopped at any of its changes leaves a whole step to restore.

Every change of a few layouts; `python -m bench.kill_requests` stops it at 10,000.
"""

from __future__ import annotations

import pytest
import torch

from bench.kill_points import CASES, Case, Layout, Outcome, stop_everywhere
from bench.stopping import Loss

pytestmark = pytest.mark.e2e

BY_NAME = {case.name: case for case in CASES}
OFTEN = ("save, and", "deletion")
"""Cases that are stopped with every loss here; the others with the hardest one."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stopped_writer_leaves_a_whole_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    outcome = Outcome()
    losses = list(Loss) if case.name.startswith(OFTEN) else [Loss.NAMES]
    layout = Layout(1, 7, 2, 1) if case.damaged else Layout(2, 7, 2, 1)
    stop_everywhere(case, layout, losses, outcome)
    assert outcome.num > 4 * len(losses)
    assert outcome.problems == []


def test_a_writer_that_is_stopped_at_a_request_leaves_a_whole_step() -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from bench import kill_requests

    outcome = Outcome()
    layout, answered = Layout(2, 7, 1, 1), [kill_requests.Moment.ANSWERED]
    with kill_requests.server():
        for name in ("save, and deletion of older ones", "final drain without a controller"):
            kill_requests.stop_at_requests(BY_NAME[name], layout, answered, outcome)
    assert outcome.num > 10
    assert outcome.problems == []
