"""A registry on this machine: Debian's docker-registry, which the nodes reach without TLS."""

from __future__ import annotations

import json

from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.ports import free_port

PROGRAM = "docker-registry"


def start(run: Run, address: str) -> str:
    """Start an empty registry; returns its host and port."""
    where = f"{address}:{free_port()}"
    config = run.directory / "registry.yaml"
    storage = {"filesystem": {"rootdirectory": str(run.directory / "registry")}}
    document = {"version": 0.1, "storage": storage, "http": {"addr": where}}
    config.write_text(json.dumps(document))  # JSON is YAML
    server = Server(run, "registry", [PROGRAM, "serve", config])
    server.start()
    server.wait_ready(lambda: f"listening on {where}" in server.tail(), timeout_s=20)
    return where
