"""A stand-alone agent: `python -m workers.agent` on a host of a cluster or in a pod.

Owns: its command line. Must not: differ in behaviour from an agent that the machine host forks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from . import preload


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m workers.agent", description=__doc__)
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument("--slots", type=int, default=1, help="workers that fit here")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the job's token")
    parser.add_argument(
        "--endpoint-file",
        type=Path,
        required=True,
        help="JSON file with address and port of the controller; read at every reconnect",
    )
    parser.add_argument("--bind", default="", help="address of the data port; default: all")
    arguments = parser.parse_args()
    missing = {k: v for k, v in preload.SINGLE_THREADED.items() if os.environ.get(k) != v}
    if missing:
        # Too late for this interpreter if anything imported numpy already: start once more.
        command = [sys.executable, "-m", "workers.agent", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **missing})
    preload.preload()
    from .node import NodeOptions, run_node  # after the preload, which must come first

    run_node(
        NodeOptions(
            job=arguments.job,
            node=arguments.node,
            slots=arguments.slots,
            token_file=arguments.token_file,
            endpoint_file=arguments.endpoint_file,
            bind_address=arguments.bind,
        )
    )


if __name__ == "__main__":
    main()
