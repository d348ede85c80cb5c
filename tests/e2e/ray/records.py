"""The record of a job in the cluster's store, written without a command or a controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from . import cluster_rig

NAME = "recorded"


@contextmanager
def cleared() -> Iterator[cluster_rig.RayRig]:
    """The cluster; the job is removed from it after the test."""
    from holdfast.orchestrator.backends.ray import backend, kv

    cluster = cluster_rig.connected()
    yield cluster
    backend.end_without_controller(NAME)
    kv.JobKeyValueStore(NAME).clear()


def order(**spec: Any) -> Any:
    from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
    from holdfast.orchestrator.backends.ray import names
    from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
    from holdfast.orchestrator.protocol.certificate import make_keys

    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": NAME},
            "spec": {"entrypoint": {"script": "train.py"}} | spec,
        }
    )
    made = make_keys(names.tls("0123456789abcdef"))
    return ControllerOrder(
        document=job_to_mapping(job), job=NAME, job_id="0123456789abcdef", spec_directory="/",
        token=made.token, certificate=made.certificate, key=made.key,
    )  # fmt: skip


def record(order: Any) -> Any:
    """Record what `holdfast run` records first."""
    from holdfast.orchestrator.backends.ray import kv

    keys = kv.JobKeyValueStore(NAME)
    assert keys.create(kv.RECORD, msgspec.msgpack.encode(order))
    return keys
