"""The token and the TLS key pair of a job."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from holdfast.orchestrator.backends.kubernetes.job_secret import ensure_keys, secret_document
from holdfast.orchestrator.kube.errors import SECRETS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol.certificate import make_keys
from holdfast.orchestrator.protocol.tls import server_context_from_pem
from tests.unit.hosts.kubernetes.operator_harness import StatefulFakeApi
from tests.unit.kube.fake_api import cluster_of
from tests.unit.runtime.certificates import client_context_from_pem

NAME = "0b1c.jobs.holdfast.dev"


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """Bytes that a client receives when it connects."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname=name
        )
        received = await reader.read()
        writer.close()
    return received


def test_the_keys_of_a_job_authenticate_both_sides(tmp_path: Path) -> None:
    keys = make_keys(NAME)
    server = server_context_from_pem(keys.certificate, keys.key)
    client = client_context_from_pem(tmp_path, keys.certificate, keys.key)
    assert asyncio.run(handshake(server, client, NAME)) == b"welcome"


def test_the_keys_of_another_job_are_refused(tmp_path: Path) -> None:
    ours, theirs = make_keys(NAME), make_keys(NAME)
    server = server_context_from_pem(ours.certificate, ours.key)
    client = client_context_from_pem(tmp_path, theirs.certificate, theirs.key)
    with pytest.raises(ssl.SSLError):
        asyncio.run(handshake(server, client, NAME))


def test_the_certificate_names_the_job_and_no_host() -> None:
    certificate = x509.load_pem_x509_certificate(make_keys(NAME).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NAME]


def test_a_secret_has_the_files_of_the_pods_and_the_job_as_owner() -> None:
    keys = make_keys(NAME)
    document = secret_document(Owner("team-a", "llm", "0b1c"), keys)
    assert document["metadata"]["name"] == "llm-agents"
    assert document["metadata"]["ownerReferences"][0]["uid"] == "0b1c"
    assert base64.b64decode(document["data"]["token"]).decode() == keys.token
    assert base64.b64decode(document["data"]["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE")


def test_keys_do_not_show_in_logs() -> None:
    keys = make_keys(NAME)
    assert keys.token not in f"{keys} {keys!r}"
    assert len(keys.token) == 64 and make_keys(NAME).token != keys.token


async def test_a_deleted_secret_costs_no_agents_even_when_the_operator_was_killed_too() -> None:
    api = StatefulFakeApi()
    owner = Owner("team", "llm", "uid")
    async with cluster_of(api) as cluster:
        keys, made = await ensure_keys(cluster, owner, None, fresh=True)
        assert made == "new"
        del api.objects[SECRETS.path("team", "llm-agents")]
        restored, made = await ensure_keys(cluster, owner, None)
        assert made == "restored" and restored == keys
        assert await ensure_keys(cluster, owner, None) == (keys, "found")
        other = Owner("team", "llm", "another-uid")
        api.objects.pop(SECRETS.path("team", "llm-agents"))
        fresh, _made = await ensure_keys(cluster, other, None)
        assert fresh != keys, "the copy belongs to an earlier job of this name"
