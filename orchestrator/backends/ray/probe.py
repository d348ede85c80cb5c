"""Asks an address what answers there before Ray connects to it. Ray itself tries a wrong port for
up to 40 s, and its C++ prints lines that no user can read."""

from __future__ import annotations

import os
from typing import Literal

TIMEOUT_S = 4.0
GCS_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Takes an empty request. Of the head's GCS (gcs_service.proto)."""
CLIENT_METHOD = "/ray.rpc.RayletDriver/ClusterInfo"
"""Of the server of Ray's client (ray_client.proto)."""
Service = Literal["gcs", "client", "other", "token-missing", "token-refused", "unknown"]
"""`other`: no service of Ray that takes drivers. `unknown`: no answer in time."""


def service_at(host: str, port: int) -> Service:
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return "unknown"  # Ray has the certificates
    import grpc

    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    token = _token()
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method, service in ((GCS_METHOD, "gcs"), (CLIENT_METHOD, "client")):
            try:
                channel.unary_unary(method)(b"", timeout=TIMEOUT_S, metadata=token)
            except grpc.RpcError as error:
                code = error.code()
            else:
                code = grpc.StatusCode.OK
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return "token-refused" if token else "token-missing"
            if code is grpc.StatusCode.UNAVAILABLE:
                return "other"
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "unknown"
            if code is not grpc.StatusCode.UNIMPLEMENTED:
                return "gcs" if service == "gcs" else "client"
    return "other"


def _token() -> tuple[tuple[str, str], ...]:
    """What Ray itself would send; nothing without a token, or with a Ray that knows none."""
    try:
        from ray._private.authentication import grpc_authentication_client_interceptor as client

        found: tuple[tuple[str, str], ...] = client._get_authentication_metadata_tuple()
    except Exception:  # not in Ray 2.51; Ray's own error where the token's file cannot be read
        return ()
    return found
