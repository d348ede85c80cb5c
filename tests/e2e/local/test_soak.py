"""Forty real faults of `python -m bench.soak`, which causes a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak import Log, soak
from bench.soak_rig import can_mount

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAULTS = 40


def test_forty_faults_are_recovered_and_change_no_bit(tmp_path: Path) -> None:
    log = Log(tmp_path / "results.jsonl")
    soak(tmp_path, log, faults=FAULTS, seed=615, faults_per_job=FAULTS, disks=can_mount())
    found = log.summary()
    assert found["problems"] == []
    assert found["recovered"] == found["faults"] == FAULTS
    assert found["jobs_identical"] == found["jobs_compared"] == 1
    assert found["jobs"] == 2, "the other one shrinks and grows"
