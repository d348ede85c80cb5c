"""What a recovery must not touch: every step's loss is the one of an undisturbed run.

Owns: whole jobs through the command, with real kills, compared loss by loss. Must not: look at
times.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.e2e

STEPS = 160


def spec(name: str, **changes: Any) -> dict[str, Any]:
    """A tiny model, so that a step takes some ten milliseconds."""
    config = {
        "steps": STEPS,
        "globalBatch": 8,
        "model": {"dim": 64, "numLayers": 2, "numHeads": 2},
        "data": {"sequenceLength": 32},
    }
    wanted = {
        "nodes": {"min": 1, "max": 2},
        "workersPerNode": 2,
        "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
        "parallelism": {"shard": 2},
        "checkpoint": {"storage": {"everySteps": 50}},
        **changes,
    }
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": wanted,
    }


class Job:
    """One job run by the command in a home of its own."""

    def __init__(self, directory: Path, document: dict[str, Any]) -> None:
        self.name = document["metadata"]["name"]
        self.home = directory / "home"
        path = directory / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(document))
        self.output = directory / f"{self.name}.log"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                self._command("run", str(path)), stdout=out, stderr=subprocess.STDOUT
            )

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator.cli.main", *words, "--home", str(self.home)]

    def call(self, *words: str) -> Any:
        done = subprocess.run(self._command(*words, "--json"), capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if max(self.losses(), default=-1) >= step:
                return
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached: {self.output.read_text()}")

    def finish(self) -> dict[str, Any]:
        assert self.process.wait(timeout=120) == 0, self.output.read_text()
        report: dict[str, Any] = self.call("report", self.name)
        return report

    def losses(self) -> dict[int, str]:
        """Loss of every step as rank 0 printed it; a step that was redone must print the same."""
        found: dict[int, str] = {}
        for log in sorted(self.home.glob(f"jobs/{self.name}/logs/gen-*/rank-00000.log")):
            for step, loss in re.findall(r"^step (\d+) loss (\S+)", log.read_text(), re.M):
                assert found.setdefault(int(step), loss) == loss, f"step {step} changed: {log}"
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), spec("undisturbed"))
    job.finish()
    losses = job.losses()
    assert sorted(losses) == list(range(STEPS))
    return losses


def test_kills_of_a_worker_and_of_a_node_leave_every_loss_as_it_was(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    job = Job(tmp_path, spec("disturbed"))
    job.wait_for_step(30)
    job.call("chaos", "kill-worker", job.name, "--rank", "1")
    job.wait_for_step(70)
    job.call("chaos", "kill-node", job.name, "--node", "node-1")
    job.wait_for_step(110)
    job.call("chaos", "kill-worker", job.name, "--rank", "2")
    report = job.finish()
    assert job.losses() == undisturbed
    assert [i["failure_class"] for i in report["incidents"]] == ["infrastructure"] * 3
    assert all(i["restored_from"] == "memory" for i in report["incidents"])
    assert all(i["steps_lost"] <= 1 for i in report["incidents"])


def test_a_job_that_shrinks_and_grows_again_learns_the_same(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Sums run in another order at another world size, so losses agree but for rounding."""
    job = Job(tmp_path, spec("resized", recovery={"growDelaySeconds": 0.5}))
    job.wait_for_step(30)
    job.call("chaos", "kill-node", job.name, "--node", "node-1", "--hold", "3")
    report = job.finish()
    sizes = [incident["world_size_after"] for incident in report["incidents"]]
    assert sizes[0] == 2
    losses = job.losses()
    assert sorted(losses) == list(range(STEPS))
    for step, loss in undisturbed.items():
        assert float(losses[step]) == pytest.approx(float(loss), rel=0.02, abs=0.02)
