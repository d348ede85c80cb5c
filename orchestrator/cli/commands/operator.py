"""`holdfast operator`: the controllers of all TrainingJobs of a cluster, in one process."""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated, Any

import typer

from holdfast.orchestrator.errors import UserError

DEFAULT_PORT = 7077
HTTP_PORT = 8080

EndpointOption = Annotated[
    str,
    typer.Option(
        "--agent-endpoint", metavar="HOST:PORT",
        help="Where agents reach this operator: usually the name of its headless Service.",
    ),
]  # fmt: skip
NamespacesOption = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", help="Namespace of jobs; may be repeated. Default: all."),
]
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="[HOST:]PORT", help="Where agents connect.")
]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        "--metrics-port", min=0, max=65535, metavar="N",
        help="Port of /healthz, /readyz and /metrics.",
    ),
]  # fmt: skip
MetricsAddressOption = Annotated[
    str, typer.Option("--metrics-address", help="Address of --metrics-port. Default: all.")
]
ImageOption = Annotated[
    str, typer.Option("--worker-image", help="Image of jobs without spec.image.")
]
PullOption = Annotated[str, typer.Option("--image-pull-policy", help="Image pull policy of jobs.")]
RequestsOption = Annotated[
    str,
    typer.Option(
        "--worker-requests",
        metavar="JSON",
        help="Resources that a pod requests per worker by default, such as "
        '{"cpu": "250m", "memory": "512Mi"}.',
    ),
]
RootOption = Annotated[
    str,
    typer.Option(
        "--checkpoint-root", metavar="PATH",
        help="Checkpoints of jobs without spec.checkpoint.path go to NAMESPACE/NAME below it.",
    ),
]  # fmt: skip
VolumeOption = Annotated[
    str,
    typer.Option(
        "--checkpoint-volume", metavar="JSON",
        help="Volume source that every pod mounts at --checkpoint-root, if that is a directory.",
    ),
]  # fmt: skip
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache-volume", metavar="JSON",
        help="Volume source for compile caches, with a directory for each namespace.",
    ),
]  # fmt: skip
PrefixesOption = Annotated[
    str,
    typer.Option(
        "--checkpoint-prefixes",
        metavar="JSON",
        help="Namespace (or *) -> directories and URLs of jobs that this operator opens with its "
        "own credentials, beside --checkpoint-root.",
    ),
]
CredentialsOption = Annotated[
    str,
    typer.Option(
        "--user-credentials",
        metavar="JSON",
        help="Namespace (or *) whose jobs may use other S3 buckets with credentials of their own "
        "-> endpoints that these may name beside AWS (or *).",
    ),
]
NotifyOption = Annotated[
    list[str] | None,
    typer.Option("--notify-host", help="Host that gets messages of spec.notify (or *)."),
]
LeaseNamespaceOption = Annotated[
    str, typer.Option("--lease-namespace", help="Namespace of the Lease. Default: its own.")
]
LeaseNameOption = Annotated[
    str, typer.Option("--lease-name", help="Name of the Lease; its holder leads.")
]
LeaseOption = Annotated[
    float,
    typer.Option(
        "--lease-seconds", min=1, metavar="S", help="A dead leader is replaced after this time."
    ),
]
IdentityOption = Annotated[
    str, typer.Option("--identity", help="Holder of the Lease.", show_default="host name")
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig, outside of a cluster.")
]
GangWaitOption = Annotated[
    float,
    typer.Option(
        "--gang-wait-seconds", min=0, metavar="S",
        help="An incomplete job releases its nodes after this time to a job that comes first.",
    ),
]  # fmt: skip
GangHoldOption = Annotated[
    float,
    typer.Option(
        "--gang-hold-seconds", min=0, metavar="S", help="... to other workloads after this time."
    ),
]
ProvisioningOption = Annotated[
    float,
    typer.Option(
        "--provisioning-seconds", min=0, metavar="S",
        help="... not earlier than this while an autoscaler adds machines for it.",
    ),
]  # fmt: skip
StatusOption = Annotated[float, typer.Option("--status-interval-seconds", min=0.1, hidden=True)]
LogOption = Annotated[str, typer.Option("--log-format", help="json or text.")]


def register(app: typer.Typer, panel: str) -> None:
    app.command(hidden=True)(operator)  # for the chart, not for people


def operator(
    agent_endpoint: EndpointOption,
    namespace: NamespacesOption = None,
    listen: ListenOption = str(DEFAULT_PORT),
    metrics_port: MetricsPortOption = HTTP_PORT,
    metrics_address: MetricsAddressOption = "",
    worker_image: ImageOption = "",
    image_pull_policy: PullOption = "",
    worker_requests: RequestsOption = "",
    checkpoint_root: RootOption = "",
    checkpoint_volume: VolumeOption = "",
    checkpoint_prefixes: PrefixesOption = "",
    user_credentials: CredentialsOption = "",
    notify_host: NotifyOption = None,
    cache_volume: CacheOption = "",
    lease_namespace: LeaseNamespaceOption = "",
    lease_name: LeaseNameOption = "holdfast-operator",
    lease_s: LeaseOption = 10.0,
    identity: IdentityOption = "",
    context: ContextOption = None,
    log_format: LogOption = "json",
    gang_wait_s: GangWaitOption = 8.0,
    gang_hold_s: GangHoldOption = 60.0,
    provisioning_s: ProvisioningOption = 900.0,
    status_interval_s: StatusOption = 5.0,
) -> None:
    """Host the controllers of all TrainingJobs of a cluster (the chart starts this).

    One of several replicas leads. If the leader dies, training continues, and the next leader
    continues from the journals.

    Example: `holdfast operator --agent-endpoint holdfast-agents.holdfast.svc:7077`
    """
    import asyncio

    from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import PodTiming
    from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
    from holdfast.orchestrator.hosts.kubernetes import run
    from holdfast.orchestrator.hosts.kubernetes.manager import Options
    from holdfast.orchestrator.hosts.kubernetes.reconciler import ReconcilerTiming
    from holdfast.orchestrator.protocol.messages import parse_endpoints

    parse_endpoints(agent_endpoint, "--agent-endpoint")  # pods would reject an invalid one
    pods = PodSettings(
        endpoint=agent_endpoint,
        image=worker_image,
        image_pull_policy=image_pull_policy,
        requests=_requests(worker_requests),
        checkpoint_volume=_checkpoint_volume(checkpoint_volume, checkpoint_root),
        checkpoint_root=checkpoint_root,
        checkpoint_prefixes=_lists("--checkpoint-prefixes", checkpoint_prefixes),
        user_credentials=_lists("--user-credentials", user_credentials),
        notify_hosts=tuple(notify_host or ()),
        cache_volume=_cache_volume(cache_volume, checkpoint_volume),
    )
    process = run.OperatorProcess(
        identity=identity or _unique_identity(),
        lease_namespace=lease_namespace, lease_name=lease_name, lease_s=lease_s,
        metrics_address=metrics_address, metrics_port=metrics_port, context=context,
    )  # fmt: skip
    run.log_to_stderr("json" if _is_json(log_format) else "text")
    gangs = {"gang_wait_s": gang_wait_s, "gang_hold_s": gang_hold_s}
    options = Options(
        pods,
        tuple(namespace or ()),
        *_address(listen),
        timing=ReconcilerTiming(status_interval_s=status_interval_s),
        pod_timing=PodTiming(**gangs, provisioning_s=provisioning_s),
    )
    asyncio.run(run.run_operator(process, options))


def _unique_identity() -> str:
    """A restarted container is a new candidate: the Lease of the old process has to expire."""
    return f"{socket.gethostname()}-{os.urandom(3).hex()}"


def _is_json(log_format: str) -> bool:
    """Raises UserError."""
    if log_format not in ("json", "text"):
        raise UserError.of("--log-format", log_format, "json or text")
    return log_format == "json"


def _address(listen: str) -> tuple[str, int]:
    """Raises UserError."""
    address, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError.of("--listen", listen, "a port, or an address and a port")
    return address.strip("[]"), int(port)


def _lists(option: str, text: str) -> dict[str, list[str]]:
    """Namespace (or *) -> URLs. Raises UserError."""
    expected = 'JSON such as {"team-a": ["s3://bucket/team-a"], "*": []}'
    if option == "--user-credentials":
        expected = expected.replace("s3://bucket/team-a", "https://minio.example.com")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UserError.of(option, f"{text} ({error})", expected) from None
    lists = parsed.values() if isinstance(parsed, dict) else [None]
    if not all(
        isinstance(item, list) and all(isinstance(p, str) and p for p in item) for item in lists
    ):
        raise UserError.of(option, text, expected)
    return dict(parsed)


def _requests(text: str) -> dict[str, str]:
    """Raises UserError."""
    from holdfast.orchestrator.api.v1alpha1.base import parse_quantity

    expected = 'JSON such as {"cpu": "250m", "memory": "512Mi"}'
    try:
        requests = json.loads(text or "{}")
        for amount in requests.values():
            parse_quantity(amount)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError.of("--worker-requests", f"{text} ({error})", expected) from None
    return {name: str(amount) for name, amount in requests.items()}


def _checkpoint_volume(text: str, root: str) -> dict[str, Any]:
    """Raises UserError."""
    if text and not root.startswith("/"):
        mounted = "an absolute directory, where --checkpoint-volume is mounted"
        raise UserError.of("--checkpoint-root", root or "nothing", mounted)
    return _volume("--checkpoint-volume", text)


def _cache_volume(text: str, checkpoint_volume: str) -> dict[str, Any]:
    """Raises UserError."""
    volume = _volume("--cache-volume", text)
    if volume and volume == _volume("--checkpoint-volume", checkpoint_volume):
        expected = "another volume than --checkpoint-volume: all jobs of a namespace write to it"
        raise UserError.of("--cache-volume", text, expected, "use another claim")
    return volume


def _volume(option: str, text: str) -> dict[str, Any]:
    """A volume source; empty without a text. Raises UserError."""
    if not text:
        return {}
    expected = 'JSON such as {"persistentVolumeClaim": {"claimName": "shared"}}'
    try:
        volume = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError.of(option, f"{text} ({error})", expected) from None
    if not isinstance(volume, dict):
        raise UserError.of(option, text, expected)
    return volume
