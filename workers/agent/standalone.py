"""A stand-alone agent: `python -m holdfast.workers.agent` on a cluster node or in a pod.

In a pod it is usually process 1. SIGTERM is a preemption notice; before the agent has started, it
ends the process. POD_IP and NODE_NAME of the downward API are the defaults of --address and
--failure-domain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol import python_command
from holdfast.orchestrator.protocol.framing import HEADER_BYTES, BadFrame, frame_length

from .linux import processes
from .pool import preload
from .process import process_env


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.workers.agent")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument("--slots", type=int, default=1, help="workers that fit here")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the job's token")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--endpoint",
        default="",
        metavar="HOST:PORT[,...]",
        help="addresses of the controller; every address of every name is tried",
    )
    where.add_argument(
        "--endpoint-file",
        type=Path,
        help="JSON file with address and port of the controller; read at every reconnect",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIRECTORY",
        help="the job's tls.crt and tls.key; needed for everything beyond loopback",
    )
    parser.add_argument("--tls-name", default="", help="the name in that certificate")
    parser.add_argument("--bind", default="", help="address of the data port; default: --address")
    parser.add_argument(
        "--address",
        default=os.environ.get("POD_IP", ""),
        help="address for other nodes; default: the local address of the controller connection",
    )
    parser.add_argument(
        "--failure-domain",
        default=os.environ.get("NODE_NAME", ""),
        help="nodes with the same value may be lost together; default: this node alone",
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL; default: spec.recovery.terminationGraceSeconds",
    )
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="where stdout and stderr go, opened for appending; its size is bounded",
    )
    parser.add_argument(
        "--die-with",
        type=int,
        metavar="PID",
        help="end when that process, which must be the parent, ends",
    )
    parser.add_argument(
        "--ask",
        metavar="JSON",
        help="put this request to the controller, print its reply and end, beside the agent with "
        'the same other options: \'{"verb": "stacks", "arguments": {}}\'',
    )
    return parser


def main() -> NoReturn:
    arguments = parser().parse_args()
    if arguments.ask is not None:
        _ask(arguments)
    # Process 1 ignores SIGTERM without a handler.
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    if arguments.die_with is not None:
        processes.die_with(arguments.die_with)
    missing = {k: v for k, v in preload.SINGLE_THREADED.items() if os.environ.get(k) != v}
    if missing:
        # numpy may be imported already, so start the interpreter again.
        command = [*python_command.start_alike("holdfast.workers.agent"), *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **missing})
    try:
        endpoints = _check(arguments)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    process_env.complete(os.environ)
    preload.preload()
    from .process.node import NodeOptions, run_node  # after the preload, which must come first

    run_node(
        NodeOptions(
            job=arguments.job,
            node=arguments.node,
            slots=arguments.slots,
            token_file=arguments.token_file,
            endpoint_file=arguments.endpoint_file,
            endpoints=endpoints,
            tls_directory=arguments.tls,
            tls_name=arguments.tls_name,
            bind_address=arguments.bind,
            address=arguments.address,
            failure_domain=arguments.failure_domain,
            grace_s=arguments.grace,
            log_file=arguments.log_file,
        )
    )


def _ask(arguments: argparse.Namespace) -> NoReturn:
    """Put a request to the controller with the keys of this node. `debug stacks` and `profile`
    run it in a pod of a Kubernetes job: who may run a command in the pod may ask."""
    try:
        reply = asyncio.run(_reply(arguments, _check(arguments)))
    except (OSError, ValueError, KeyError, asyncio.IncompleteReadError, BadFrame) as error:
        sys.exit(f"the controller of job {arguments.job} does not answer ({error})")
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.exit()


async def _reply(arguments: argparse.Namespace, endpoints: tuple[m.Endpoint, ...]) -> m.AnyMessage:
    from holdfast.orchestrator.protocol import tls

    from .process.connect import Connector, endpoint_in

    question, file = json.loads(arguments.ask), arguments.endpoint_file
    request = m.Request(
        token=arguments.token_file.read_text(encoding="ascii").strip(),
        job=arguments.job,
        verb=question["verb"],
        arguments=question["arguments"],
    )
    context = tls.client_context(*tls.files(arguments.tls)) if arguments.tls else None
    where = endpoint_in(file) if file is not None else lambda: endpoints
    reader, writer = await Connector(where, context, arguments.tls_name).connect()
    try:
        writer.write(m.encode(request))
        header = await reader.readexactly(HEADER_BYTES)
        return m.decode(await reader.readexactly(frame_length(header)))
    finally:
        writer.close()


def _check(arguments: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    """The endpoints. Raises HoldfastError for wrong arguments, before torch is imported."""
    from holdfast.orchestrator.protocol import tls

    if bool(arguments.tls) != bool(arguments.tls_name):
        got = "--tls without --tls-name" if arguments.tls else "--tls-name without --tls"
        raise UserError.of("--tls", got, "both or none")
    if not arguments.token_file.is_file():
        raise UserError.of("--token-file", str(arguments.token_file), "a file with the job's token")
    if arguments.grace is not None and arguments.grace <= 0:
        raise UserError.of("--grace", f"{arguments.grace:g}", "seconds above 0")
    if arguments.tls:
        tls.client_context(*tls.files(arguments.tls))
    return m.parse_endpoints(arguments.endpoint) if arguments.endpoint else ()
