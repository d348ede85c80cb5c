"""What needs no cluster of the Ray backend: versions, bundles, metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, load_job
from holdfast.orchestrator.backends.ray.cluster import check_version, fits
from holdfast.orchestrator.backends.ray.placement_groups import bundle_of
from holdfast.orchestrator.errors import UserError

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("version", ["2.50.1", "2.40.0", "2.9.3", "1.13.0"])
def test_a_ray_that_is_too_old_is_refused_by_its_version(version: str) -> None:
    with pytest.raises(UserError, match=f"ray: got {version}; expected 2.51 or newer"):
        check_version(version)


@pytest.mark.parametrize("version", ["2.51.0", "2.52.1", "2.60.0", "3.0.0.dev0"])
def test_a_ray_that_is_new_enough_is_taken(version: str) -> None:
    check_version(version)


def test_a_bundle_holds_what_all_workers_of_a_node_get() -> None:
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bundle"},
        "spec": {
            "entrypoint": {"script": "train.py"},
            "workersPerNode": 8,
            "resources": {"cpu": "500m", "gpu": 1, "memory": "4Gi"},
        },
    }
    bundle = bundle_of(job_from_mapping(document))
    assert bundle == {"CPU": 4.0, "GPU": 8.0, "memory": 32.0 * 2**30}
    assert fits(bundle, {"CPU": 16.0, "GPU": 8.0, "memory": 64.0 * 2**30})
    assert not fits(bundle, {"CPU": 16.0, "GPU": 4.0, "memory": 64.0 * 2**30})


def test_a_job_without_resources_takes_a_core_per_worker() -> None:
    assert bundle_of(load_job(ROOT / "examples" / "stdlib-bytes.yaml")) == {"CPU": 2.0}
