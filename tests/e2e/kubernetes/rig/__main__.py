"""Starts a cluster to try things on by hand, prints how to reach it, and removes it at Ctrl-C.

python -m tests.e2e.kubernetes.rig --nodes 2
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.settings import DEFAULT, SHORT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=0, help="0: a control plane on loopback alone")
    parser.add_argument("--short", action="store_true", help="short node-monitor settings")
    options = parser.parse_args()
    found = programs.locate()
    needed = programs.CONTROL_PLANE + (programs.NODE if options.nodes else ())
    refusal = (programs.machine_refusal() if options.nodes else None) or found.refusal(needed)
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    for ending in (signal.SIGINT, signal.SIGTERM):  # ignored in background jobs of a shell
        signal.signal(ending, signal.default_int_handler)
    settings = SHORT if options.short else DEFAULT
    with Run() as run:
        try:
            if options.nodes:
                cluster = Cluster(run, found, settings=settings)
                cluster.start(options.nodes)
                plane = cluster.control_plane
            else:
                plane = ControlPlane(run, found, settings=settings)
                plane.start()
            print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
            print(f"# this machine is {plane.address} to the pods; logs: {run.directory}")
            print("# Ctrl-C removes everything", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("# removing", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
