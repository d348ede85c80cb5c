"""A client of the Kubernetes API: verbs on plain dictionaries, with time limits and request counts.

The official client library provides authentication, TLS and connections. Its generated models are
not used: they take far more time per object than the network does, and drop unknown fields.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client as library
from kubernetes.aio import config as loader

from ..errors import UserError
from . import names
from .credentials import Credentials, Load
from .errors import Conflict, NotFound, Resource, refused, unreachable
from .names import Document as Document

TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
WATCH_S = 270
"""Asked of the server; many proxies end a watch after five minutes."""
WATCH_TIMEOUT = aiohttp.ClientTimeout(total=WATCH_S + 30, sock_connect=5, sock_read=100)
"""A bookmark comes about once a minute; without one for longer, the connection is dead."""
LOG_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)
"""A pod may print nothing for hours."""
PAGE = 500
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_CONCURRENT = 16
"""Concurrent requests, without watches and logs; the others queue. Otherwise the requests of a
thousand jobs would spend their time limits waiting for a connection."""
MAX_CONNECTIONS = MAX_CONCURRENT + 64
UNAUTHORIZED = 401


class KubeClient:
    """One API server, as one user. Raises ApiError."""

    def __init__(self, api: library.ApiClient, namespace: str, reload: Load | None = None) -> None:
        """`reload` loads the credentials again after a 401."""
        self._credentials = Credentials(api, reload)
        self.namespace = namespace
        """Of the context or the pod; commands use it by default."""
        self.host = str(api.configuration.host)
        self.requests: Counter[tuple[str, str]] = Counter()
        """(verb, resource) -> requests so far."""
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    @classmethod
    async def connect(
        cls, context: str | None = None, kubeconfig: str | Path | None = None
    ) -> KubeClient:
        """Authenticate with the pod's service account or, outside a pod and when a context or file
        is named, with a kubeconfig. Opens no connection yet. Raises UserError."""
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.is_dir()
        in_cluster = in_pod and context is None and kubeconfig is None
        file = str(kubeconfig) if kubeconfig is not None else None

        async def load() -> library.Configuration:
            configuration = library.Configuration()
            if in_cluster:
                loader.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            else:
                await loader.load_kube_config(file, context, configuration)  # type: ignore[no-untyped-call]
            configuration.connection_pool_maxsize = MAX_CONNECTIONS
            return configuration

        try:
            configuration = await load()
            if in_cluster:
                namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                namespace = _namespace(file, context)
            return cls(library.ApiClient(configuration), namespace, load)
        except (loader.ConfigException, OSError) as error:
            raise UserError(
                f"no access to a cluster ({' '.join(str(error).split())}); expected a kubeconfig "
                f"(~/.kube/config or $KUBECONFIG) with this context, or a pod's service account"
            ) from None

    async def close(self) -> None:
        await self._credentials.close()

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- one object ----------------------------------------------------------------------------
    async def get(self, resource: Resource, namespace: str, name: str) -> Document:
        return await self._send("get", "GET", resource, resource.path(namespace, name))

    async def find(self, resource: Resource, namespace: str, name: str) -> Document | None:
        """None when it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except NotFound:
            return None

    async def create(
        self, resource: Resource, namespace: str, body: Document, *, dry_run: bool = False
    ) -> Document:
        query = [("dryRun", "All")] if dry_run else []
        path = resource.path(namespace)
        return await self._send("create", "POST", resource, path, body=body, query=query)

    async def replace(self, resource: Resource, namespace: str, body: Document) -> Document:
        """Raises Conflict when metadata.resourceVersion is given and is not the current one."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._send("update", "PUT", resource, path, body=body)

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Document,
        *,
        subresource: str = "",
    ) -> Document:
        """JSON merge patch; null removes."""
        path = resource.path(namespace, name, subresource)
        return await self._send("patch", "PATCH", resource, path, body=body, content=MERGE)

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Document,
        *,
        subresource: str = "",
    ) -> Document:
        """Server-side apply, taking over fields that others have set."""
        path = resource.path(namespace, name, subresource)
        query = [("fieldManager", names.FIELD_MANAGER), ("force", "true")]
        return await self._send(
            "patch", "PATCH", resource, path, body=body, content=APPLY, query=query
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str = "",
    ) -> bool:
        """False when it does not exist or, with `uid`, when another object has its name."""
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["propagationPolicy"] = "Background"
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        path = resource.path(namespace, name)
        try:
            await self._send("delete", "DELETE", resource, path, body=options)
        except NotFound:
            return False
        except Conflict:
            if uid:
                return False
            raise
        return True

    # -- many ----------------------------------------------------------------------------------
    async def list_all(
        self, resource: Resource, namespace: str = "", selector: str = "", fields: str = ""
    ) -> tuple[list[Document], str]:
        """(objects, resource version of the list)."""
        found: list[Document] = []
        token = ""
        while True:
            query = [("limit", str(PAGE))]
            query += [("labelSelector", selector)] if selector else []
            query += [("fieldSelector", fields)] if fields else []
            query += [("continue", token)] if token else []
            page = await self._send("list", "GET", resource, resource.path(namespace), query=query)
            found += page.get("items") or ()
            token = page["metadata"].get("continue", "")
            if not token:
                return found, str(page["metadata"].get("resourceVersion", ""))

    async def watch(
        self,
        resource: Resource,
        version: str,
        namespace: str = "",
        selector: str = "",
        fields: str = "",
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[tuple[str, Document]]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object) since `version`, for WATCH_S at most.

        `on_open` is called when the server has accepted the watch; the first object may take a
        minute. Raises Expired when the server no longer has the history since `version`.
        """
        query = [("watch", "true"), ("resourceVersion", version)]
        query += [("allowWatchBookmarks", "true"), ("timeoutSeconds", str(WATCH_S))]
        query += [("labelSelector", selector)] if selector else []
        query += [("fieldSelector", fields)] if fields else []
        path = resource.path(namespace)
        try:
            response = await self._open("watch", "GET", resource, path, None, "", query)
            on_open()
            try:
                async for line in response.content:
                    kind, document = self._event(path, line)
                    yield kind, document
            finally:
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise unreachable(self.host, "watch", path, error) from None

    def _event(self, path: str, line: bytes) -> tuple[str, Document]:
        event = json.loads(line)
        document: Document = event["object"]
        if event["type"] == "ERROR":
            status = int(document.get("code", 500))
            raise refused(self.host, "watch", path, status, json.dumps(document).encode())
        return str(event["type"]), document

    async def version(self) -> str:
        """The version of the API server, such as v1.36.2."""
        found = await self._send("get", "GET", Resource("", "", "version"), "/version")
        return str(found["gitVersion"])

    async def log(
        self,
        namespace: str,
        pod: str,
        *,
        follow: bool,
        lines: int | None = None,
        since: str | None = None,
    ) -> Any:
        """The output of a pod's training container as a byte stream. With `since` (RFC 3339; empty:
        from the beginning) each line starts with its timestamp."""
        query = [("container", names.CONTAINER), ("follow", "true" if follow else "false")]
        query += [("tailLines", str(lines))] if lines is not None else []
        query += [("timestamps", "true")] if since is not None else []
        query += [("sinceTime", since)] if since else []
        resource = Resource("", "v1", "pods")
        path = resource.path(namespace, pod, "log")
        response = await self._open("log", "GET", resource, path, None, "", query)
        return response.content

    # -- requests ------------------------------------------------------------------------------
    async def _send(
        self,
        verb: str,
        method: str,
        resource: Resource,
        path: str,
        *,
        body: Document | None = None,
        content: str = "",
        query: list[tuple[str, str]] | None = None,
    ) -> Document:
        try:
            async with self._slots:
                response = await self._open(
                    verb, method, resource, path, body, content, query or []
                )
                text = await response.read()
            found: Document = json.loads(text)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise unreachable(self.host, verb, path, error) from None
        return found

    async def _open(
        self,
        verb: str,
        method: str,
        resource: Resource,
        path: str,
        body: Document | None,
        content: str,
        query: list[tuple[str, str]],
    ) -> aiohttp.ClientResponse:
        """A 2xx response whose body is not read yet."""
        self.requests[verb, resource.plural] += 1
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content or "application/json"
        auth = self._credentials.auth
        request = (verb, method, path, query, headers, body)
        response = await self._request(*request)
        if response.status == UNAUTHORIZED and await self._credentials.reload(auth):
            response.close()
            response = await self._request(*request)
        if not 200 <= response.status <= 299:
            raise refused(self.host, verb, path, response.status, await response.read())
        return response

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        headers: dict[str, str],
        body: Document | None,
    ) -> aiohttp.ClientResponse:
        timeout = {"watch": WATCH_TIMEOUT, "log": LOG_TIMEOUT}.get(verb, TIMEOUT)
        api = self._credentials.api
        request = await api.param_serialize(
            method,
            path,
            query_params=query,
            # The library adds the token to this dictionary.
            header_params=dict(headers),
            body=body,
            auth_settings=["BearerToken"],
        )
        result = await api.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = result.response
        return response


def _namespace(file: str | None, context: str | None) -> str:
    """The namespace of a kubeconfig context."""
    contexts, active = loader.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")
