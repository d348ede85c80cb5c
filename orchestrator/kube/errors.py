"""Kinds of objects, and the errors that an API server answers with, in words that help a user.

Nothing here retries: the caller knows which requests may be repeated.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..errors import HoldfastError
from . import names


class Resource(NamedTuple):
    """A kind of object, as the API's paths name it."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of one object or of all; without a namespace, of all namespaces."""
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{self.base}{where}/{self.plural}{tail}"


PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events")
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False
)
LEASES = Resource("coordination.k8s.io", "v1", "leases")
JOBS = Resource(names.GROUP, names.VERSION, names.PLURAL)


class ApiError(HoldfastError):
    """The API server rejected a request or did not answer."""

    def __init__(self, text: str, *, status: int = 0, reason: str = "", message: str = "") -> None:
        super().__init__(text)
        self.status, self.reason = status, reason
        self.message = message or text
        """The message as the API server wrote it."""


class Unreachable(ApiError):
    """No response; the request may have been carried out."""


class NotAuthenticated(ApiError):
    """401."""

    exit_code = 2


class Forbidden(ApiError):
    """403: a right is missing, or admission (a quota, a policy) rejected it."""

    exit_code = 2

    @property
    def right_missing(self) -> bool:
        return _RIGHT.search(self.message) is not None


class NotFound(ApiError):
    """404: the object or its kind does not exist."""

    exit_code = 2


class Conflict(ApiError):
    """409: the object exists already, or has changed since it was read."""

    @property
    def exists(self) -> bool:
        return self.reason == "AlreadyExists"


class Expired(ApiError):
    """410: the API server no longer has that resource version; list again."""


class Invalid(ApiError):
    """400, 413 or 422: the object is not valid."""

    exit_code = 2


class TooBusy(ApiError):
    """429 or 5xx: a retry may succeed."""


_NO_KIND = re.compile(r"the server could not find the|404 page not found")
_RIGHT = re.compile(r"cannot (\w+) resource \"([^\"]+)\"")
_TYPES: dict[int, type[ApiError]] = {
    400: Invalid,
    401: NotAuthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    413: Invalid,
    422: Invalid,
    429: TooBusy,
}


def refused(host: str, verb: str, path: str, status: int, body: bytes) -> ApiError:
    """The error for a response that is not 2xx."""
    reason, message = _status(body)
    kind = _TYPES.get(status, TooBusy if status >= 500 else ApiError)
    what = f"{verb} {path}"
    if kind is NotAuthenticated:
        text = (
            f"the API server at {host} rejected the credentials ({message or 'no reason given'}); "
            f"the token or certificate has expired or belongs to another cluster: log in again"
        )
    elif kind is Forbidden and (right := _RIGHT.search(message)):
        text = (
            f"missing right: {right[1]} {right[2]} ({message}); bind a role that grants it, see "
            f"the chart's RBAC"
        )
    elif kind is NotFound and f"/{names.GROUP}/" in path and _NO_KIND.match(message):
        text = (
            f"the cluster at {host} does not serve {names.PLURAL}.{names.GROUP} in version "
            f"{names.VERSION}; install this version of Holdfast there (helm upgrade --install)"
        )
    else:
        text = message or f"{what}: the API server at {host} answered {status} without a message"
    return kind(text, status=status, reason=reason, message=message)


def no_exec(namespace: str, pod: str) -> str:
    """The message for a user who may not run commands in pods."""
    return (
        f"missing right: create pods/exec in namespace {namespace} (a question runs a command in "
        f"pod {pod}; API servers before 1.35 check get pods/exec); bind a role with both verbs, as "
        f"edit has"
    )


def unreachable(host: str, verb: str, path: str, error: Exception) -> Unreachable:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(
        f"the API server at {host} does not answer ({why}); check that the cluster is up and that "
        f"the context is the right one",
        message=f"{verb} {path}: {why}",
    )


def _status(body: bytes) -> tuple[str, str]:
    """(reason, message) of a Status document, or the text of any other body."""
    try:
        document = json.loads(body)
        return str(document.get("reason") or ""), str(document.get("message") or "")
    except (ValueError, AttributeError):
        return "", body.decode(errors="replace").strip()[:500]
