"""Time to fetch shards from another agent's memory, in clear and with TLS, on loopback.

One process serves and one fetches. Prints a table; `--out` also writes it. On loopback both share
the machine's cores, so the ratio is the worst case: between machines each side has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from statistics import median

from bench import conditions
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.workers.agent.storage import peer_transfer

NAME = "bench.jobs.holdfast.dev"
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/data_port.md")
    given = parser.parse_args()
    rows = [
        "| shard | in clear | TLS 1.3 | ratio | CPU in clear | CPU with TLS | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    busy = conditions.wait_until_quiet()
    with tempfile.TemporaryDirectory() as directory:
        make_certificate(Path(directory))
        ways = (peer_transfer.credentials("token", None, ""),
                peer_transfer.credentials("token", Path(directory), NAME))  # fmt: skip
        for megabytes in given.megabytes:
            num_bytes = megabytes * MIB
            clear, secret = (measure(num_bytes, way, given.repetitions) for way in ways)
            rates = [f"{num_bytes / each[0] / 1e6:,.0f} MB/s" for each in (clear, secret)]
            costs = [f"{each[1] / num_bytes * 1e9:.2f} s/GB" for each in (clear, secret)]
            cells = [
                f"{megabytes} MiB",
                *rates, f"{secret[0] / clear[0]:.1f}",
                *costs, f"{secret[1] / clear[1]:.1f}",
            ]  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    lines = ["# The data port between agents", ""]
    lines += [f"{name}: {value}. " for name, value in conditions.describe().items()]
    lines.append(
        f"Other processes used {busy:.1f} cores when it began. Loopback, one connection, medians "
        f"of {given.repetitions}. CPU: of both sides together."
    )
    lines += ["", *rows, ""]
    given.out.write_text("\n".join(lines))


def measure(
    num_bytes: int, credentials: peer_transfer.PeerCredentials, repetitions: int
) -> tuple[float, float]:
    """(median seconds of a fetch from another process, CPU seconds of both for one fetch)."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(serve(theirs, num_bytes, credentials))
        finally:
            os._exit(0)
    theirs.close()
    port = int.from_bytes(ours.recv(4), "big")
    wanted = StagedShard(0, 1, 0, 1, num_bytes)
    times = []
    cpu_s = -time.process_time()
    for _ in range(repetitions):
        began = time.perf_counter()
        fd, _num_bytes = peer_transfer.fetch("127.0.0.1", port, credentials, wanted)
        times.append(time.perf_counter() - began)
        os.close(fd)
    cpu_s += time.process_time()
    os.kill(pid, signal.SIGKILL)
    _pid, _status, usage = os.wait4(pid, 0)
    cpu_s += usage.ru_utime + usage.ru_stime
    return median(times), cpu_s / repetitions


async def serve(
    ready: socket.socket, num_bytes: int, credentials: peer_transfer.PeerCredentials
) -> None:
    fd = os.memfd_create("shard")
    os.posix_fallocate(fd, 0, num_bytes)

    def on_get(_get: peer_transfer.Get) -> peer_transfer.Answer:
        return peer_transfer.TransferBuffer(os.dup(fd), num_bytes, 1, lambda ok: None)

    def on_put(_put: peer_transfer.Put) -> peer_transfer.Answer:
        return "nothing is taken here"

    port = peer_transfer.DataPort(credentials, on_get, on_put)
    ready.sendall(port.open("127.0.0.1").to_bytes(4, "big"))
    await asyncio.Event().wait()


def make_certificate(directory: Path) -> None:
    """Make a certificate such as a job in a cluster has."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = tls.files(directory)
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    key_file.write_bytes(pem)


if __name__ == "__main__":
    main()
