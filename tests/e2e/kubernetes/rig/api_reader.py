"""Reads objects over HTTP on one connection, for tests that poll.

A kubectl process takes 0.1 s of CPU, and a poll starts several each second; a request takes 4 ms.
"""

from __future__ import annotations

import functools
import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

import yaml

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
TIMEOUT_S = 30


class ApiReader:
    """One user of one API server."""

    def __init__(self, server: str, ca: str, token: str) -> None:
        self._address = urllib.parse.urlsplit(server)
        self._tls = ssl.create_default_context(cafile=ca)
        self._token = token
        self._connection: http.client.HTTPSConnection | None = None
        self._paths: dict[str, tuple[str, str, bool]] = {}

    def read(self, path: str, accept: str = "application/json") -> tuple[int, dict[str, Any]]:
        """(status, document). Raises OSError when the API server does not answer."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
        for attempt in range(2):
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(
                    self._address.hostname or "",
                    self._address.port,
                    timeout=TIMEOUT_S,
                    context=self._tls,
                )
            try:
                self._connection.request("GET", path, headers=headers)
                response = self._connection.getresponse()
                return response.status, json.loads(response.read())
            except (http.client.HTTPException, OSError, ValueError) as error:
                # The server closes an idle connection when it ends.
                self._connection.close()
                self._connection = None
                if attempt:
                    raise OSError(f"GET {path}: {error}") from error
        raise AssertionError

    def path(self, kind: str, namespace: str, name: str = "") -> str | None:
        """None for a kind that the API server does not serve. `kind`: as kubectl takes it."""
        if kind not in self._paths:
            self._discover()
        if kind not in self._paths:
            return None
        base, plural, namespaced = self._paths[kind]
        where = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{base}{where}/{plural}{f'/{name}' if name else ''}"

    def forget(self, kind: str) -> None:
        """The definition of this kind has been replaced."""
        self._paths.pop(kind, None)

    def _discover(self) -> None:
        for root in ("/api", "/apis"):
            _status, found = self.read(root, DISCOVERY)
            for group in found["items"]:
                name = group["metadata"].get("name", "")
                for version in reversed(group["versions"]):  # the preferred one comes first
                    base = f"/apis/{name}/{version['version']}" if name else "/api/v1"
                    for one in version["resources"]:
                        self._add(base, name, one)

    def _add(self, base: str, group: str, resource: dict[str, Any]) -> None:
        plural = resource["resource"]
        entry = (base, plural, resource["scope"] == "Namespaced")
        names = (plural, resource.get("singularResource", ""), *resource.get("shortNames", ()))
        for name in filter(None, names):
            if group:
                self._paths[f"{name}.{group}"] = entry
            # Of two groups with a resource of this name kubectl takes the core group.
            if name not in self._paths or not self._paths[name][0].startswith("/api/"):
                self._paths[name] = entry


@functools.cache
def _reader(kubeconfig: Path, _changed_ns: int) -> ApiReader | None:
    document = yaml.safe_load(kubeconfig.read_text())
    try:
        contexts = {one["name"]: one["context"] for one in document["contexts"]}
        context = contexts[document["current-context"]]
        clusters = {one["name"]: one["cluster"] for one in document["clusters"]}
        users = {one["name"]: one["user"] for one in document["users"]}
        cluster, user = clusters[context["cluster"]], users[context["user"]]
        return ApiReader(cluster["server"], cluster["certificate-authority"], user["token"])
    except KeyError:
        return None


def reader_of(kubeconfig: Path) -> ApiReader | None:
    """None unless the kubeconfig authenticates by a token, as those of the rig do."""
    return _reader(kubeconfig, kubeconfig.stat().st_mtime_ns)
