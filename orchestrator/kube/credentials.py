"""API credentials, loaded again after a 401.

A watch lives for days, a token of an exec plugin or of OIDC for minutes. The client library loads a
kubeconfig once; it refreshes only service account tokens by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import yaml
from kubernetes.aio import client as library
from kubernetes.aio import config as loader

Load = Callable[[], Awaitable[library.Configuration]]

log = logging.getLogger("holdfast.kubernetes")


class AuthHeaders(NamedTuple):
    """Headers that authenticate this client to the API server. Never printed."""

    token: str
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "AuthHeaders(...)"


class Credentials:
    """`load` reads them from their source; without it they cannot be reloaded."""

    def __init__(self, api: library.ApiClient, load: Load | None = None) -> None:
        self.api, self._load = api, load
        self.auth = _auth(api.configuration)
        self._lock = asyncio.Lock()
        self._replaced: list[library.ApiClient] = []
        """Clients with an earlier certificate; a watch may still use one."""

    async def reload(self, refused: AuthHeaders) -> bool:
        """True if `api` now has other credentials than those that were refused."""
        async with self._lock:
            if self.auth != refused:
                return True  # another request was rejected too and has reloaded them
            if self._load is None:
                return False
            try:
                headers = await self._load()
                auth = _auth(headers)
            except (loader.ConfigException, OSError, ValueError, LookupError, yaml.YAMLError) as e:
                log.warning("credentials could not be reloaded: %s", " ".join(str(e).split()))
                return False
            # The library returns empty credentials when a plugin fails. With those the error would
            # name the missing rights of system:anonymous.
            if auth == self.auth or not any(auth):
                return False
            if auth[1:] == self.auth[1:]:
                configuration = self.api.configuration
                configuration.api_key = headers.api_key
                configuration.refresh_api_key_hook = headers.refresh_api_key_hook
            else:
                self._replaced.append(self.api)
                self.api = library.ApiClient(headers)
            self.auth = auth
            log.info("the API server rejected the credentials; they were reloaded")
            return True

    async def close(self) -> None:
        for api in (*self._replaced, self.api):
            await api.close()  # type: ignore[no-untyped-call]


def _auth(configuration: library.Configuration) -> AuthHeaders:
    token = str(configuration.api_key.get("BearerToken") or "")
    files = (configuration.cert_file, configuration.key_file)
    certificate, key = (Path(path).read_bytes() if path else b"" for path in files)
    return AuthHeaders(token, certificate, key)
