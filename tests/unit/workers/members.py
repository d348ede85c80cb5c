"""Memberships and Assigns: of one node with one worker, unless a test gives something else."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.protocol.facts import Membership, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol


def membership(**given: Any) -> Membership:
    usual = {"generation": 1, "mesh": Mesh(), "num_nodes": 1, "workers_per_node": 1,
             "master_address": "127.0.0.1", "master_port": 1, "restart_count": 0}  # fmt: skip
    return Membership(**{**usual, **given})


def assigned(**given: Any) -> worker_protocol.Assign:
    usual = {"membership": membership(), "seat": WorkerSeat(0, 0, 0, True), "node_rank": 0,
             "environment": {}}  # fmt: skip
    return worker_protocol.Assign(**{**usual, **given})
