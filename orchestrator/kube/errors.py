"""What the API server refuses -> errors that a person can act on.

Owns: the exception types and their sentences. Must not: retry; the callers know what may be said
twice.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..errors import HoldfastError
from . import names


class Resource(NamedTuple):
    """A kind of object, as it stands in paths."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Of one object, or of all; without a namespace: of all namespaces."""
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{self.base}{where}/{self.plural}{tail}"


PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
JOBS = Resource(names.GROUP, names.VERSION, names.PLURAL)


class ApiError(HoldfastError):
    """The API server said no, or nothing."""

    def __init__(self, text: str, *, status: int = 0, reason: str = "", message: str = "") -> None:
        super().__init__(text)
        self.status, self.reason = status, reason
        self.message = message or text
        """The API server's own words."""


class Unreachable(ApiError):
    """No answer: whether the request was carried out is not known."""


class NotAuthenticated(ApiError):
    """401."""

    exit_code = 2


class Forbidden(ApiError):
    """403: a right is missing, or admission (a quota, a policy) refuses."""

    exit_code = 2

    @property
    def right_missing(self) -> bool:
        return _RIGHT.search(self.message) is not None


class NotFound(ApiError):
    """404: the object, or its kind."""

    exit_code = 2


class Conflict(ApiError):
    """409: it exists already, or somebody else has changed it since it was read."""

    @property
    def exists(self) -> bool:
        return self.reason == "AlreadyExists"


class Expired(ApiError):
    """410: that far back the API server does not remember; list anew."""


class Invalid(ApiError):
    """400 or 422: the object is not one."""

    exit_code = 2


class TooBusy(ApiError):
    """429, or an error of the server itself; later it may work."""


_NO_KIND = re.compile(r"the server could not find the|404 page not found")
_RIGHT = re.compile(r"cannot (\w+) resource \"([^\"]+)\"")
_TYPES: dict[int, type[ApiError]] = {
    400: Invalid, 401: NotAuthenticated, 403: Forbidden, 404: NotFound, 409: Conflict,
    410: Expired, 413: Invalid, 422: Invalid, 429: TooBusy,
}  # fmt: skip


def refused(host: str, verb: str, path: str, status: int, body: bytes) -> ApiError:
    """The error behind an answer that is not 2xx."""
    reason, message = _status(body)
    kind = _TYPES.get(status, TooBusy if status >= 500 else ApiError)
    what = f"{verb} {path}"
    if kind is NotAuthenticated:
        text = (
            f"the API server at {host} does not accept our credentials ({message or 'no reason'}); "
            f"the token or certificate has expired or belongs to another cluster; log in again"
        )
    elif kind is Forbidden and (right := _RIGHT.search(message)):
        text = (
            f"missing right: {right[1]} {right[2]} ({message}); bind a role that has it, see the "
            f"chart's RBAC"
        )
    elif kind is NotFound and f"/{names.GROUP}/" in path and _NO_KIND.match(message):
        text = (
            f"the cluster at {host} does not know {names.PLURAL}.{names.GROUP} in version "
            f"{names.VERSION}; install the Holdfast of this version there (helm upgrade --install)"
        )
    else:
        text = message or f"{what}: the API server at {host} answered {status} without a reason"
    return kind(text, status=status, reason=reason, message=message)


def unreachable(host: str, verb: str, path: str, error: Exception) -> Unreachable:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(
        f"the API server at {host} does not answer ({why}); is the cluster up, and is it the "
        f"context that you meant?",
        message=f"{verb} {path}: {why}",
    )


def _status(body: bytes) -> tuple[str, str]:
    """(reason, message) of a Status document; of anything else its text."""
    try:
        document = json.loads(body)
        return str(document.get("reason") or ""), str(document.get("message") or "")
    except (ValueError, AttributeError):
        return "", body.decode(errors="replace").strip()[:500]
