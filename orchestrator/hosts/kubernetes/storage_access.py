"""Checkpoint paths that the operator opens, and the credentials for them. Pure.

The operator serves users who must not read each other's checkpoints, and its own credentials open
all of them. So it uses these only for

* paths below ROOT/NAMESPACE of the job (of a directory, exactly ROOT/NAMESPACE/NAME, which is what
  its pods mount), and below the prefixes that the chart allows its namespace,
* and only where the job has no setting that could send them elsewhere, such as an endpoint.

Everything else needs credentials of the job itself: a Secret of its namespace
(spec.checkpoint.secretName) or spec.env. The chart says which namespaces may bring some, and which
endpoints they may name: the operator reaches servers that their pods may not.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings, checkpoint_path
from holdfast.orchestrator.errors import Problem, SpecError, UserError
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import SECRETS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.checkpoint_store.options import SCHEMES, access

FIELD = "spec.checkpoint.path"
HARMLESS_CONFIG = {
    "retries", "connect_timeout", "read_timeout", "max_pool_connections",
    "request_checksum_calculation", "response_checksum_validation",
}  # fmt: skip
"""Settings of botocore that do not change where a request goes, or with which credentials."""
HARMLESS = ("client_kwargs", "config_kwargs", "timeout", "anon", "default_block_size")
"""The same of options of a driver; the two with further options in them are looked through."""
OWN = ("key", "secret", "token")
"""Credentials."""
ENDPOINTS = ("endpoint_url", "client_kwargs.endpoint_url")
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
ALL = "*"
LISTED = "checkpoints.userCredentials of the chart"


def problems(job: TrainingJob, settings: PodSettings, known_path: str = "") -> list[Problem]:
    """`known_path`: where a started job without a path of its own has its checkpoints."""
    path = checkpoint_path(job, settings, known_path)
    odd = {"..", "", "."} if _is_directory(path) else {".."}
    if odd & set(_plain(path).split("/")[1:]):
        expected = "a path without .., . and //"
        return [Problem(FIELD, path, expected, "write the path that you mean")]
    try:
        options = access(path, job.spec.env).options
    except SpecError as error:
        return list(error.problems)
    is_allowed, secret = _is_allowed(job, settings, path), job.spec.checkpoint.secret_name
    if is_allowed and _is_directory(path):
        return []  # of the operator's own file system: no credentials are used
    endpoints = _own_endpoints(job, settings) if _is_s3(path) else None
    if endpoints is not None and (
        secret is not None or (options.get("key") and options.get("secret"))
    ):
        return [_endpoint_problem(job, option) for option in _redirecting(options, endpoints)]
    if not is_allowed:
        return [_path_problem(job, settings, path)]
    if secret is not None:
        expected = f"nothing, as jobs of namespace {job.metadata.namespace} use no credentials of "
        fix = f"remove it, or have the namespace added to {LISTED}"
        return [Problem("spec.checkpoint.secretName", secret, f"{expected}their own", fix)]
    may_have_own = endpoints is not None
    return [_redirect_problem(option, may_have_own) for option in _redirecting(options)]


def _own_endpoints(job: TrainingJob, settings: PodSettings) -> list[str] | None:
    """Endpoints that the job may name, with credentials of its own; None: it may have none."""
    lists = [settings.user_credentials.get(owner) for owner in (job.metadata.namespace, ALL)]
    if lists == [None, None]:
        return None
    return [endpoint for some in lists for endpoint in some or ()]


def _is_directory(path: str) -> bool:
    return _plain(path).startswith("/")


def _is_s3(path: str) -> bool:
    scheme, is_url, _ = path.partition("://")
    return bool(is_url) and "::" not in path and SCHEMES.get(scheme) == "s3"


def _plain(path: str) -> str:
    """A file:// URL as the directory that it names, without a slash at its end."""
    for scheme in ("file://", "local://"):
        path = path.removeprefix(scheme)
    return path.rstrip("/")


def _prefixes(job: TrainingJob, settings: PodSettings) -> list[str]:
    """Prefixes below which the operator uses its own credentials for this job, beside the root."""
    return [
        *settings.checkpoint_prefixes.get(job.metadata.namespace, ()),
        *settings.checkpoint_prefixes.get(ALL, ()),
    ]


def directory_above(job: TrainingJob, settings: PodSettings, path: str) -> str:
    """The operator's directory that has this path, and in which other users write too; empty for a
    URL."""
    if not _is_directory(path):
        return ""
    plain = _plain(path)
    earlier_root = plain.removesuffix(f"/{job.metadata.namespace}/{job.name}")
    tops = map(_plain, (settings.checkpoint_root, *_prefixes(job, settings), earlier_root))
    return next((top for top in tops if _is_directory(top) and _is_below(plain, top)), "/")


def _is_allowed(job: TrainingJob, settings: PodSettings, path: str) -> bool:
    root, own = _plain(settings.checkpoint_root), f"{job.metadata.namespace}/{job.name}"
    plain = _plain(path)
    if _is_directory(root) and _is_below(plain, root):
        return plain == f"{root}/{own}"
    if job.spec.checkpoint.path is None and path.endswith(f"/{own}"):
        return True  # chosen by an operator, perhaps with another root
    below = [f"{root}/{job.metadata.namespace}"] if root else []
    return any(_is_below(plain, prefix) for prefix in (*below, *_prefixes(job, settings)))


def _is_below(path: str, prefix: str) -> bool:
    """True if the path is below the other, or equal."""
    return path == prefix or path.startswith(f"{prefix.rstrip('/')}/")


def _redirecting(options: Mapping[str, Any], endpoints: Sequence[str] | None = None) -> list[str]:
    """Options of the job that are not known to be harmless. `endpoints`: the job has credentials of
    its own, and may send them there."""
    harmless_names = {*HARMLESS, *(OWN if endpoints is not None else ())}
    redirecting = {name: value for name, value in options.items() if name not in harmless_names}
    for part, harmless in (("client_kwargs", {"region_name"}), ("config_kwargs", HARMLESS_CONFIG)):
        inner = options.get(part) or {}
        values = inner if isinstance(inner, Mapping) else {str(inner): None}
        redirecting |= {f"{part}.{name}": values[name] for name in sorted(set(values) - harmless)}
    return [name for name, value in redirecting.items()
            if name not in ENDPOINTS or not _is_listed(str(value), endpoints or ())]  # fmt: skip


def _is_listed(endpoint: str, endpoints: Sequence[str]) -> bool:
    return ALL in endpoints or endpoint.rstrip("/") in (listed.rstrip("/") for listed in endpoints)


def _path_problem(job: TrainingJob, settings: PodSettings, path: str) -> Problem:
    root, namespace = _plain(settings.checkpoint_root), job.metadata.namespace
    ours = f"{root}/{namespace}" + f"/{job.name}" * _is_directory(root)
    below = ", ".join([*([ours] if root else []), *_prefixes(job, settings)]) or "none"
    fix = "choose such a path, or have it added to checkpoints.allowedPrefixes of the chart"
    if _is_directory(root) and _is_below(_plain(path), root):
        fix = "leave it out: a pod gets only the directory of its own job"
    if _is_s3(path) and _own_endpoints(job, settings) is not None:
        fix += "; or name a Secret with credentials of your own in spec.checkpoint.secretName"
    expected = f"a path that the operator may open for namespace {job.metadata.namespace} ({below})"
    return Problem(FIELD, path, expected, fix)


def _endpoint_problem(job: TrainingJob, option: str) -> Problem:
    """Problem of an endpoint, without values from Secrets and other namespaces' endpoints."""
    expected = f"no setting of the store but credentials, region and an endpoint that {LISTED}"
    expected += f" allows namespace {job.metadata.namespace}"
    got, fix = f"a variable that sets {option} of the store", f"remove it, or have {LISTED} changed"
    where = "spec.env" if job.spec.checkpoint.secret_name is None else "spec.env or its Secret"
    return Problem(where, got, expected, fix)


def _redirect_problem(option: str, may_have_own: bool) -> Problem:
    fix = "remove it"
    if may_have_own:
        fix += (
            f", or add credentials of your own ({' and '.join(CREDENTIALS)}): name their Secret "
            f"in spec.checkpoint.secretName"
        )
    expected = "no setting of the store that goes with the operator's own credentials"
    return Problem("spec.env", f"a variable that sets {option} of the store", expected, fix)


# -- the job's own Secret ------------------------------------------------------------------------
async def with_secret(job: TrainingJob, owner: Owner, cluster: KubeClient) -> TrainingJob:
    """The job with the variables of its Secret in spec.env, for its store alone: never journaled or
    shown. Raises UserError and ApiError."""
    name = job.spec.checkpoint.secret_name
    if name is None:
        return job
    field = "spec.checkpoint.secretName"
    secret = await cluster.find(SECRETS, owner.namespace, name)
    if secret is None:
        expected = f"a Secret of namespace {owner.namespace}"
        raise UserError.of(field, f"{name}, which does not exist", expected)
    env = {**_variables(secret), **job.spec.env}
    missing = [key for key in CREDENTIALS if not env.get(key)]
    if missing:
        got, expected = f"{name} without {' and '.join(missing)}", " and ".join(CREDENTIALS)
        raise UserError.of(field, got, expected, "add them to the Secret")
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": env})})


def _variables(secret: Document) -> dict[str, str]:
    data = secret.get("data") or {}
    return {name: base64.b64decode(text).decode(errors="replace") for name, text in data.items()}
