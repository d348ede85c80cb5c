"""A hundred random histories; world.py lists their faults.

A seed that fails is replayed with `python -m tests.sim --seed N --verbose`, and its bug becomes a
transcript in tests/unit/core.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import run_seed
from .world import World

ROOT = Path(__file__).resolve().parents[2]


play = functools.cache(run_seed.play)


@pytest.mark.parametrize("seed", range(100))
def test_the_job_ends_as_expected_and_leaves_nothing_behind(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", [7, 29, 61])
def test_a_seed_has_the_same_history_under_any_hash_seed(seed: int) -> None:
    here = run_seed.play(seed).digest
    assert here == play(seed).digest
    for hash_seed in ("1", "4242"):
        result = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", str(seed)], cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert here in result.stdout, result.stdout


def test_the_seeds_meet_every_kind_of_fault() -> None:
    """Together they have what they are meant to cover."""
    worlds: list[World] = [play(seed) for seed in range(0, 100, 4)]
    states = [world.host.state for world in worlds]
    rules = {incident.rule for state in states for incident in state.incidents}
    assert {"outside-signal", "hang", "node-lost", "native-crash"} <= rules | {"lost-first"}
    assert "preempted" in rules
    assert sum(world.host.crashes for world in worlds) > 20
    assert sum(world.host.journal.num_compactions for world in worlds) > 20
    assert sum(world.host.num_snapshots_restored for world in worlds) > 5
    assert max(state.generation for state in states) > 6
    assert sum(len(world.oracle.new_codes) for world in worlds) > 5
    assert sum(world.num_takeovers for world in worlds) > 3
    assert sum(world.num_kept for world in worlds) > 5
    assert sum(world.num_differed for world in worlds) > 5
    assert sum(world.num_again for world in worlds) > 5
    assert sum(world.num_full_disks for world in worlds) > 3
    restored = {incident.restored_from for state in states for incident in state.incidents}
    assert {"memory", "storage"} <= restored


def test_steps_are_staged_at_the_controllers_request() -> None:
    """Requests precede planned interruptions, in worlds that do not stage every step."""
    requested = [play(seed).oracle.requested for seed in range(2, 100, 3)]
    assert sum(map(len, requested)) >= 5


def test_growths_wait_for_standbys_that_import() -> None:
    """oracle.py bounds the wait."""
    waited = [play(seed).oracle.growths_that_waited for seed in range(1, 100, 3)]
    assert sum(map(len, waited)) >= 5
