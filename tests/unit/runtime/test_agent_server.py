"""One port for many jobs: clients of each need its own key and token."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast import __version__
from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.runtime.agent_server import AgentConnection, AgentServer, Connection

from . import certificates
from .harness import BOUND_S, Frames, node_facts


@dataclass
class Sink:
    """Records what arrives."""

    log: list[tuple[str, str]] = field(default_factory=list)

    def refusal(self, hello: wire.Hello) -> str:
        return "it was given up" if hello.node == "given-up" else ""

    def joined(self, link: AgentConnection, hello: wire.Hello) -> None:
        self.log.append(("joined", hello.node))

    def received(self, node: str, message: wire.Message) -> None:
        self.log.append((type(message).__name__, node))

    def disconnected(self, node: str) -> None:
        self.log.append(("disconnected", node))

    def replaced(self, node: str) -> None:
        self.log.append(("replaced", node))


@dataclass
class Job:
    """A job as it is registered."""

    name: str
    directory: Path
    with_tls: bool = True
    sink: Sink = field(default_factory=Sink)
    links: dict[str, AgentConnection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.with_tls:
            certificates.make(self.directory, self.tls_name)

    @property
    def tls_name(self) -> str:
        return f"{self.name.replace('/', '-')}.jobs.holdfast.dev"

    @property
    def token(self) -> str:
        return f"token of {self.name}"

    async def answer(self, client: Connection, request: wire.Request) -> None:
        client.send(wire.Reply(ok=True, detail=f"{request.verb} of {self.name}"))

    def register(self, endpoint: AgentServer) -> None:
        context, name = None, ""
        if self.with_tls:
            context, name = tls.server_context(*tls.files(self.directory)), self.tls_name
        welcome = wire.Welcome(
            spec={"name": self.name}, spec_directory="", checkpoint_path="", log_directory="",
            heartbeat_interval_s=0.5,
        )  # fmt: skip
        endpoint.register(
            self.name, token=self.token, welcome=lambda: welcome, links=self.links, sink=self.sink,
            handler=self.answer, tls_name=name, context=context,
        )  # fmt: skip

    def hello(self, **fields: object) -> wire.Hello:
        joined = wire.NodeJoined(facts=node_facts())
        values = {"token": self.token, "job": self.name, "node": "n", "joined": joined, **fields}
        return wire.Hello(**values)  # type: ignore[arg-type]

    def client(self) -> ssl.SSLContext:
        return tls.client_context(*tls.files(self.directory))

    async def dial(self, endpoint: AgentServer, name: str | None = None) -> Frames:
        opening = asyncio.open_connection(
            endpoint.address, endpoint.port, ssl=self.client(),
            server_hostname=name or self.tls_name,
        )  # fmt: skip
        return Frames(*await opening)


async def until(condition: object) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0)


def two_jobs(tmp_path: Path, *, with_tls: bool = True) -> tuple[Job, Job]:
    return (
        Job("space/one", tmp_path / "one", with_tls),
        Job("space/two", tmp_path / "two", with_tls),
    )


async def opened(*jobs: Job, tls: bool = False) -> AgentServer:
    endpoint = AgentServer()
    await endpoint.open(tls=tls)
    for job in jobs:
        job.register(endpoint)
    return endpoint


async def test_every_job_gets_its_own_welcome_over_the_same_port(tmp_path: Path) -> None:
    one, two = two_jobs(tmp_path)
    endpoint = await opened(one, two, tls=True)
    for num_heartbeats, (job, other) in enumerate(((one, two), (two, one))):
        frames = await job.dial(endpoint)
        frames.send(job.hello())
        assert (await frames.receive()).spec == {"name": job.name}
        frames.send(wire.Heartbeat(generation=0))
        await until(lambda job=job: ("Heartbeat", "n") in job.sink.log)
        assert list(job.links) == ["n"] and not other.links
        assert sum(kind == "Heartbeat" for kind, _node in other.sink.log) <= num_heartbeats
        frames.close()
        await until(lambda job=job: not job.links)
    await endpoint.close()


async def test_a_client_without_the_key_of_the_job_cannot_connect(tmp_path: Path) -> None:
    one, two = two_jobs(tmp_path)
    endpoint = await opened(one, two, tls=True)
    # The server's certificate is not the one that this client trusts.
    with pytest.raises(OSError):  # ssl.SSLError is one
        await one.dial(endpoint, name=two.tls_name)
    with pytest.raises(OSError):  # ssl.SSLError is one
        await one.dial(endpoint, name="unknown.jobs.holdfast.dev")
    # A client that trusts every server, without a certificate or with that of another job.
    for certificate in (None, tls.files(one.directory)):
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        if certificate:
            careless.load_cert_chain(*certificate)
        assert await refused_in_the_handshake(endpoint, careless, two)
    assert one.sink.log == [] and two.sink.log == []
    await endpoint.close()


async def refused_in_the_handshake(
    endpoint: AgentServer, context: ssl.SSLContext, job: Job
) -> bool:
    """A client of TLS 1.3 gets the error with its first read."""
    try:
        opening = asyncio.open_connection(
            endpoint.address, endpoint.port, ssl=context, server_hostname=job.tls_name
        )
        frames = Frames(*await opening)
        frames.send(job.hello())
        answer = await frames.receive()
    except OSError:
        return True
    frames.close()
    return answer is None


async def test_a_client_without_a_server_name_or_without_tls_is_refused(tmp_path: Path) -> None:
    one, _two = two_jobs(tmp_path)
    endpoint = await opened(one, tls=True)
    nameless = one.client()
    nameless.check_hostname = False
    with pytest.raises(OSError):
        await asyncio.open_connection(
            endpoint.address, endpoint.port, ssl=nameless, server_hostname=""
        )
    frames = await Frames.dial(endpoint.address, endpoint.port)
    frames.send(one.hello())
    assert await frames.receive() is None
    assert one.sink.log == []
    frames.close()
    await endpoint.close()


async def test_the_key_of_one_job_gives_no_access_to_another_even_with_its_token(
    tmp_path: Path,
) -> None:
    one, two = two_jobs(tmp_path)
    endpoint = await opened(one, two, tls=True)
    frames = await one.dial(endpoint)
    frames.send(two.hello())
    refused = await frames.receive()
    assert "space/two" in refused.detail and await frames.receive() is None
    assert two.sink.log == []
    frames.close()
    frames = await one.dial(endpoint)
    frames.send(wire.Request(token=two.token, job=two.name, verb="cancel"))
    assert not (await frames.receive()).ok
    frames.close()
    await endpoint.close()


async def test_an_agent_of_an_unknown_job_may_reconnect(tmp_path: Path) -> None:
    one, two = two_jobs(tmp_path, with_tls=False)
    endpoint = await opened(one)
    frames = await Frames.dial(endpoint.address, endpoint.port)
    frames.send(two.hello())
    refused = await frames.receive()
    assert refused.detail == "job: got space/two; this is not its controller, or not yet"
    assert not refused.final and await frames.receive() is None
    frames.close()
    for hello in (one.hello(token=two.token), one.hello(node="given-up")):
        frames = await Frames.dial(endpoint.address, endpoint.port)
        frames.send(hello)
        assert (await frames.receive()).final
        frames.close()
    await endpoint.close()


async def test_a_request_of_another_protocol_is_rejected_and_both_releases_are_named(
    tmp_path: Path,
) -> None:
    one, _two = two_jobs(tmp_path, with_tls=False)
    endpoint = await opened(one)
    frames = await Frames.dial(endpoint.address, endpoint.port)
    version = limits.PROTOCOL_VERSION + 1
    frames.send(wire.Request(token=one.token, verb="status", version=version, release="7.1.0"))
    refused = await frames.receive()
    assert not refused.ok and "got 7.1.0 (protocol 2)" in refused.detail, refused.detail
    assert f"'.[train]' in a checkout of Holdfast {__version__}" in refused.detail
    frames.close()
    await endpoint.close()


def test_the_first_message_carries_its_version_though_it_is_the_default(tmp_path: Path) -> None:
    """The receiver has a default of its own, of its own version."""
    one, _two = two_jobs(tmp_path, with_tls=False)
    for first in (one.hello(), wire.Request(token="t", verb="status")):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(first))
        assert (sent["version"], sent["release"]) == (limits.PROTOCOL_VERSION, __version__)


async def test_a_request_without_a_job_goes_to_the_only_one(tmp_path: Path) -> None:
    one, two = two_jobs(tmp_path, with_tls=False)
    endpoint = await opened(one)

    async def ask(job: str, token: str) -> wire.Reply:
        frames = await Frames.dial(endpoint.address, endpoint.port)
        frames.send(wire.Request(token=token, job=job, verb="status"))
        reply: wire.Reply = await frames.receive()
        frames.close()
        return reply

    assert (await ask("", one.token)).detail == "status of space/one"
    two.register(endpoint)
    assert "job: got none" in (await ask("", one.token)).detail
    assert (await ask("space/two", two.token)).detail == "status of space/two"
    assert "token" in (await ask("space/two", one.token)).detail
    await endpoint.close()


async def test_unregistering_a_job_closes_its_connections_and_no_others(tmp_path: Path) -> None:
    one, two = two_jobs(tmp_path)
    endpoint = await opened(one, two, tls=True)
    frames = {job.name: await job.dial(endpoint) for job in (one, two)}
    for job in (one, two):
        frames[job.name].send(job.hello())
        assert isinstance(await frames[job.name].receive(), wire.Welcome)
    endpoint.unregister(one.name)
    endpoint.unregister(one.name)
    assert await frames[one.name].receive() is None
    assert ("disconnected", "n") not in one.sink.log, "it left, the node did not"
    with pytest.raises(OSError):  # ssl.SSLError is one
        await one.dial(endpoint)
    frames[two.name].send(wire.Heartbeat(generation=0))
    await until(lambda: ("Heartbeat", "n") in two.sink.log)
    for one_side in frames.values():
        one_side.close()
    await endpoint.close()


def test_tls_contexts_are_made_from_the_contents_of_a_secret(tmp_path: Path) -> None:
    certificate, key = certificates.make(tmp_path, "x.jobs.holdfast.dev")
    pem = certificate.read_bytes(), key.read_bytes()
    for context in (tls.server_context_from_pem(*pem), tls.client_context(certificate, key)):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs(binary_form=True)) + context.cert_store_stats()["x509"] > 0
    with pytest.raises(tls.TlsUnusable, match="expected both in PEM"):
        tls.server_context_from_pem(pem[0], b"no key")
    with pytest.raises(tls.TlsUnusable, match=r"tls\.crt"):
        tls.client_context(*tls.files(tmp_path / "nowhere"))
