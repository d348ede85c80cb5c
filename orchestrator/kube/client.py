"""A client of the Kubernetes API: verbs on plain dictionaries, with time limits and request counts.

The official client library provides authentication, TLS and connections. Its generated models are
not used: they take far more time per object than the network does, and drop unknown fields.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio import client as library
from kubernetes.aio import config as loader

from ..errors import UserError
from . import names
from .credentials import Credentials, Load
from .errors import PODS, Conflict, Forbidden, NotFound, Resource, no_exec, refused, unreachable
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
UNAUTHORIZED, FORBIDDEN = 401, 403
CHANNELS = "v4.channel.k8s.io"
"""Subprotocol of exec over a WebSocket: the first byte of a message is its channel, 1 for stdout, 2
for stderr, 3 for a Status when the command has ended."""


class _Request(NamedTuple):
    verb: str
    """The verb as in RBAC rules."""
    method: str
    resource: Resource
    path: str
    query: Sequence[tuple[str, str]] = ()
    body: Document | None = None
    content: str = "application/json"
    timeout: aiohttp.ClientTimeout = TIMEOUT


class Executed(NamedTuple):
    """Result of a command in a pod."""

    succeeded: bool
    stdout: bytes
    stderr: bytes


class KubeClient:
    """One API server, as one user. Raises ApiError."""

    def __init__(self, api: library.ApiClient, namespace: str, reload: Load | None = None) -> None:
        """`reload` loads the credentials again after a 401."""
        self._credentials = Credentials(api, reload)
        self.namespace = namespace
        """Namespace of the context or the pod; commands use it by default."""
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
        path = resource.path(namespace, name)
        return await self._send(_Request("get", "GET", resource, path))

    async def find(self, resource: Resource, namespace: str, name: str) -> Document | None:
        """None when it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except NotFound:
            return None

    async def create(
        self, resource: Resource, namespace: str, body: Document, *, dry_run: bool = False
    ) -> Document:
        """`dry_run`: only check it; unknown and repeated fields are errors then."""
        query = [("dryRun", "All"), ("fieldValidation", "Strict")] if dry_run else []
        path = resource.path(namespace)
        return await self._send(_Request("create", "POST", resource, path, query, body))

    async def replace(self, resource: Resource, namespace: str, body: Document) -> Document:
        """Raises Conflict when metadata.resourceVersion is given and is not the current one."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._send(_Request("update", "PUT", resource, path, body=body))

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Document,
        *,
        subresource: str = "",
        apply: bool = False,
    ) -> Document:
        """JSON merge patch; null removes. With `apply` server-side apply, taking over fields that
        others have set."""
        path = resource.path(namespace, name, subresource)
        query = [("fieldManager", names.FIELD_MANAGER), ("force", "true")] if apply else []
        content = APPLY if apply else MERGE
        return await self._send(_Request("patch", "PATCH", resource, path, query, body, content))

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
            await self._send(_Request("delete", "DELETE", resource, path, body=options))
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
        documents: list[Document] = []
        latest = ""
        async for page, version in self.pages(resource, namespace, selector, fields):
            documents, latest = documents + page, version
        return documents, latest

    async def pages(
        self, resource: Resource, namespace: str = "", selector: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[list[Document], str]]:
        """The same as `list_all`, page by page."""
        path, token = resource.path(namespace), ""
        while True:
            query = [("limit", str(PAGE)), *_selectors(selector, fields)]
            query += [("continue", token)] if token else []
            page = await self._send(_Request("list", "GET", resource, path, query))
            token = page["metadata"].get("continue", "")
            yield list(page.get("items") or ()), str(page["metadata"].get("resourceVersion", ""))
            if not token:
                return

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
        query += _selectors(selector, fields)
        path = resource.path(namespace)
        request = _Request("watch", "GET", resource, path, query, timeout=WATCH_TIMEOUT)
        try:
            response = await self._open(request)
            on_open()
            try:
                async for line in response.content:
                    event = json.loads(line)
                    document: Document = event["object"]
                    if event["type"] == "ERROR":
                        status, body = int(document.get("code", 500)), json.dumps(document)
                        raise refused(self.host, "watch", path, status, body.encode())
                    yield str(event["type"]), document
            finally:
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise unreachable(self.host, "watch", path, error) from None

    async def version(self) -> str:
        """The version of the API server, such as v1.36.2."""
        resource = Resource("", "", "version")
        return str((await self._send(_Request("get", "GET", resource, "/version")))["gitVersion"])

    async def log(
        self, namespace: str, pod: str, *, follow: bool, since: str, only_new: bool = False
    ) -> Any:
        """The output of a pod's training container since a time (RFC 3339; empty: all of it), or
        from now on, as a byte stream, whose lines start with their timestamps."""
        query = [("container", names.CONTAINER), ("follow", "true" if follow else "false")]
        query += [("timestamps", "true"), *([("sinceTime", since)] if since else [])]
        query += [("tailLines", "0")] if only_new else []
        path = PODS.path(namespace, pod, "log")
        request = _Request("log", "GET", PODS, path, query, timeout=LOG_TIMEOUT)
        return (await self._open(request)).content

    async def execute(
        self, namespace: str, pod: str, command: Sequence[str], timeout_s: float
    ) -> Executed:
        """Run a command in a pod's training container. Raises ApiError."""
        query = [("container", names.CONTAINER), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        path = PODS.path(namespace, pod, "exec")
        self.requests["create", "pods/exec"] += 1
        api = self._credentials.api
        _method, url, headers, *_rest = await api.param_serialize(
            "GET", path, query_params=query, header_params={}, auth_settings=["BearerToken"]
        )
        rest = api.rest_client
        rest.pool_manager = rest.pool_manager or rest._create_pool_manager()
        received: dict[int, bytes] = {}
        try:
            async with (
                asyncio.timeout(timeout_s),
                rest.pool_manager.ws_connect(
                    url, protocols=[CHANNELS], headers=headers, proxy=rest.proxy
                ) as stream,
            ):
                async for message in stream:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        channel, data = message.data[0], message.data[1:]
                        received[channel] = received.get(channel, b"") + data
        except aiohttp.WSServerHandshakeError as error:
            if error.status == FORBIDDEN:
                raise Forbidden(no_exec(namespace, pod), status=FORBIDDEN) from None
            raise refused(self.host, "exec", path, error.status, b"") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise unreachable(self.host, "exec", path, error) from None
        ended = json.loads(received.get(3) or "{}")
        return Executed(ended.get("status") == "Success", *(received.get(n, b"") for n in (1, 2)))

    # -- requests ------------------------------------------------------------------------------
    async def _send(self, request: _Request) -> Document:
        try:
            async with self._slots:
                text = await (await self._open(request)).read()
            answer: Document = json.loads(text)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise unreachable(self.host, request.verb, request.path, error) from None
        return answer

    async def _open(self, request: _Request) -> aiohttp.ClientResponse:
        """A 2xx response whose body is not read yet."""
        self.requests[request.verb, request.resource.plural] += 1
        auth = self._credentials.auth
        response = await self._attempt(request)
        if response.status == UNAUTHORIZED and await self._credentials.reload(auth):
            response.close()
            response = await self._attempt(request)
        if not 200 <= response.status <= 299:
            body = await response.read()
            raise refused(self.host, request.verb, request.path, response.status, body)
        return response

    async def _attempt(self, request: _Request) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}  # the library adds the token to it
        if request.body is not None:
            headers["Content-Type"] = request.content
        api = self._credentials.api
        arguments = await api.param_serialize(
            request.method,
            request.path,
            query_params=list(request.query),
            header_params=headers,
            body=request.body,
            auth_settings=["BearerToken"],
        )
        result = await api.call_api(*arguments, _request_timeout=request.timeout)
        response: aiohttp.ClientResponse = result.response
        return response


def _selectors(selector: str, fields: str) -> list[tuple[str, str]]:
    query = [("labelSelector", selector)] if selector else []
    return query + ([("fieldSelector", fields)] if fields else [])


def _namespace(file: str | None, context: str | None) -> str:
    """The namespace of a kubeconfig context."""
    contexts, active = loader.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    chosen = next((entry for entry in contexts if entry["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")
