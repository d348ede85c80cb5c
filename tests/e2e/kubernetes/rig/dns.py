"""The cluster's name server: resolves names of Services to the addresses of their pods.

There is no kube-proxy, so a Service with a cluster IP resolves like a headless one, and its ports
have to be those of the pods. While the API server is down, the last response stays valid. Names
outside the cluster are not resolved.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable

DOMAIN = "cluster.local"
PORT = 53
ADDRESS_RECORD = 1
NO_ERROR, NO_SUCH_NAME = 0, 3
TTL_S = 1
LOOK_UP_S = 0.2
"""Seconds between the thread's checks whether to end."""

Request = Callable[[str], bytes | None]
"""GET of a path of the API; None without a 2xx response."""


class NameServer:
    """Answers from `start` until `close`."""

    def __init__(self, address: str, request: Request) -> None:
        self._request = request
        self._last: dict[str, list[str]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, PORT))
        self._socket.settimeout(LOOK_UP_S)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rig-dns", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Free the address: the next cluster of this process may have the same."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                question, sender = self._socket.recvfrom(4096)
                with contextlib.suppress(OSError, IndexError, struct.error):  # a malformed query
                    self._socket.sendto(self._answer(question), sender)

    def _answer(self, question: bytes) -> bytes:
        """RFC 1035, section 4: the header, the question, one record for each address."""
        name, end = read_name(question)
        (kind,) = struct.unpack("!H", question[end : end + 2])
        code, addresses = self.look_up(name)
        if kind != ADDRESS_RECORD:
            addresses = []
        flags = 0x8580 | code  # response, authoritative, recursion desired and available
        header = question[:2] + struct.pack("!HHHHH", flags, 1, len(addresses), 0, 0)
        records = b"".join(
            struct.pack("!HHHIH", 0xC00C, ADDRESS_RECORD, 1, TTL_S, 4) + socket.inet_aton(one)
            for one in addresses
        )
        return header + question[12 : end + 4] + records

    def look_up(self, name: str) -> tuple[int, list[str]]:
        words = name.lower().rstrip(".").removesuffix(f".{DOMAIN}").split(".")
        if not name.lower().rstrip(".").endswith(DOMAIN) or len(words) != 3 or words[2] != "svc":
            return NO_SUCH_NAME, []
        service, namespace = words[:2]
        text = self._request(f"/api/v1/namespaces/{namespace}/services/{service}")
        if text is None:
            known = self._last.get(name)
            return (NO_ERROR, known) if known else (NO_SUCH_NAME, [])
        self._last[name] = self._addresses(json.loads(text), namespace, service)
        return NO_ERROR, self._last[name]

    def _addresses(
        self, document: dict[str, dict[str, str]], namespace: str, service: str
    ) -> list[str]:
        if not document["spec"].get("selector"):
            return [document["spec"]["clusterIP"]]
        text = self._request(
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector=kubernetes.io/service-name={service}"
        )
        slices = json.loads(text or '{"items": []}')["items"]
        return sorted(
            {
                address
                for one in slices
                for endpoint in one.get("endpoints") or ()
                if endpoint.get("conditions", {}).get("ready", True)
                for address in endpoint["addresses"]
            }
        )


def read_name(message: bytes) -> tuple[str, int]:
    """The name in the query and the offset behind it."""
    labels, offset = [], 12
    while length := message[offset]:
        labels.append(message[offset + 1 : offset + 1 + length].decode("ascii", "replace"))
        offset += 1 + length
    return ".".join(labels), offset + 1
