"""What answers at an address, asked of real gRPC and HTTP servers on this machine."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import cluster, jobs_api, probe
from holdfast.orchestrator.errors import UserError

grpc = pytest.importorskip("grpc", reason="grpc comes with ray[default]")
HEAD, CLIENT = {probe.GCS_METHOD}, {probe.CLIENT_METHOD}
TOKEN = (("authorization", "Bearer secret"),)


@contextmanager
def serving(methods: set[str], token: str = "") -> Iterator[int]:
    """The port of a server with these methods; `token`: what each of them demands."""

    def answer(_request: bytes, context: Any) -> bytes:
        if token and ("authorization", f"Bearer {token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is missing or incorrect")
        return b""

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            known = details.method in methods
            return grpc.unary_unary_rpc_method_handler(answer) if known else None

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handlers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def http_serving(status: int = 404) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"Unauthorized: Missing authentication token")

        def log_message(self, *_: Any) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refusal(address: str) -> str:
    with pytest.raises(UserError) as raised:
        cluster.check_service(address)
    text = str(raised.value)
    assert "\n" not in text and text.startswith(f"--ray: got {address} (")
    return text


def test_the_right_service_is_accepted() -> None:
    with serving(HEAD) as head, serving(CLIENT) as client:
        cluster.check_service(f"127.0.0.1:{head}")
        cluster.check_service(f"ray://127.0.0.1:{client}")


def test_a_client_port_without_ray_in_front_is_named_with_the_address_to_use() -> None:
    with serving(CLIENT) as port:
        text = refusal(f"127.0.0.1:{port}")
    assert f"Ray's client server); expected ray://127.0.0.1:{port}" in text


def test_the_heads_port_with_ray_in_front_is_named_with_the_address_to_use() -> None:
    with serving(HEAD) as port:
        text = refusal(f"ray://127.0.0.1:{port}")
    assert f"the head's GCS); expected 127.0.0.1:{port}" in text


def test_another_service_is_named_with_all_addresses_that_a_cluster_has() -> None:
    with serving(set()) as other, http_serving() as web:
        for port in (other, web):
            for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
                text = refusal(address)
                assert "neither the head's GCS nor Ray's client server" in text
                assert "ray://127.0.0.1:10001" in text and "http://127.0.0.1:8265" in text


@pytest.mark.parametrize(("methods", "scheme"), [(HEAD, ""), (CLIENT, "ray://")])
def test_a_missing_and_a_wrong_token_are_named(
    methods: set[str], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(methods, token="secret") as port:
        monkeypatch.setattr(probe, "_token", tuple)
        text = refusal(f"{scheme}127.0.0.1:{port}")
        assert "demands a token, and none is here" in text
        assert "RAY_AUTH_MODE=token" in text and "RAY_AUTH_TOKEN_PATH" in text
        monkeypatch.setattr(probe, "_token", lambda: (("authorization", "Bearer other"),))
        assert "refuses the token of this process" in refusal(f"{scheme}127.0.0.1:{port}")
        monkeypatch.setattr(probe, "_token", lambda: TOKEN)
        cluster.check_service(f"{scheme}127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("status", "why"), [(401, "demands a token, and none is here"), (403, "refuses the token of")]
)
def test_a_dashboard_that_demands_a_token_names_it(status: int, why: str) -> None:
    pytest.importorskip("ray.job_submission", reason="Ray is not installed: pip install '.[ray]'")
    with http_serving(status) as port, pytest.raises(UserError) as raised:
        jobs_api.JobsApi(f"http://127.0.0.1:{port}")
    assert why in str(raised.value) and "ray get-auth-token" in str(raised.value)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_submitting_to_a_wrong_port_is_refused_as_every_other_command(scheme: str) -> None:
    pytest.importorskip("ray.job_submission", reason="Ray is not installed: pip install '.[ray]'")
    with serving(HEAD if scheme else CLIENT) as port, pytest.raises(UserError) as raised:
        jobs_api.JobsApi(f"{scheme}127.0.0.1:{port}")
    assert "(that port is" in str(raised.value)
