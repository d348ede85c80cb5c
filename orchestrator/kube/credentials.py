"""Who we are to an API server, and who we are now when it does not take that any more.

Owns: the client library's connection, and loading credentials anew after a 401: a token of an exec
plugin or of OIDC lives for minutes, a watch of ours for days. Must not: know of requests.
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
    """What the API server knows us by. Never printed."""

    token: str
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Proof(...)"


class Credentials:
    """`load` reads them from where they come from; without it they are what they are."""

    def __init__(self, api: library.ApiClient, load: Load | None = None) -> None:
        self.api, self._load = api, load
        self.proof = _proof(api.configuration)
        self._lock = asyncio.Lock()
        self._spent: list[library.ApiClient] = []
        """With connections by an earlier certificate; a watch may still use one."""

    async def renewed(self, refused: AuthHeaders) -> bool:
        """Whether there are other ones than those that were refused; then `api` has them."""
        async with self._lock:
            if self.proof != refused:
                return True  # another request was refused, too, and came first
            if self._load is None:
                return False
            try:
                found = await self._load()
                proof = _proof(found)
            except (loader.ConfigException, OSError, ValueError, LookupError, yaml.YAMLError) as e:
                log.warning("credentials could not be loaded anew: %s", " ".join(str(e).split()))
                return False
            # Nothing at all is what the library makes of a plugin that failed: without it we would
            # hear of the rights of somebody anonymous.
            if proof == self.proof or not any(proof):
                return False
            if proof[1:] == self.proof[1:]:
                configuration = self.api.configuration
                configuration.api_key = found.api_key
                configuration.refresh_api_key_hook = found.refresh_api_key_hook
            else:
                self._spent.append(self.api)
                self.api = library.ApiClient(found)
            self.proof = proof
            log.info("the API server refused our credentials; they were loaded anew")
            return True

    async def close(self) -> None:
        for api in (*self._spent, self.api):
            await api.close()  # type: ignore[no-untyped-call]


def _proof(configuration: library.Configuration) -> AuthHeaders:
    token = str(configuration.api_key.get("BearerToken") or "")
    files = (configuration.cert_file, configuration.key_file)
    certificate, key = (Path(path).read_bytes() if path else b"" for path in files)
    return AuthHeaders(token, certificate, key)
