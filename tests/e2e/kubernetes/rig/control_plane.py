"""A control plane: etcd, API server, controller-manager and scheduler as processes.

Needs no privileges when it listens on loopback.
"""

from __future__ import annotations

import json
import secrets
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from tests.e2e.kubernetes.rig.binaries import Binaries
from tests.e2e.kubernetes.rig.certificates import Authority, Pair, write_signing_pair
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.settings import DEFAULT, Settings
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.ports import free_port

LOOPBACK = "127.0.0.1"
# Token -> user and group; elsewhere the components have certificates.
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
CORES = "2"
"""A small machine has no more."""
START_TIMEOUT_S = 60


class ControlPlane:
    """Control plane that can be killed in parts and started again; the run removes it."""

    def __init__(
        self,
        run: Run,
        binaries: Binaries,
        *,
        address: str = LOOPBACK,
        port: int | None = None,
        services: str = "10.0.0.0/24",
        settings: Settings = DEFAULT,
    ) -> None:
        self.run = run
        self.binaries = binaries
        self.settings = settings
        self.directory = run.directory / "control-plane"
        self.directory.mkdir()
        self.address = address
        self.port = port or free_port()
        self.authority = Authority(self.directory)
        self._tokens = {name: secrets.token_hex(16) for name in USERS}
        self._write_tokens()
        self._client_port, self._peer_port = free_port(), free_port()
        self.etcd = self._server("etcd", self._etcd_options())
        self.api_server = self._server("kube-apiserver", self._api_server_options(services))
        self.controller_manager = self._server(
            "kube-controller-manager", self._controller_manager_options()
        )
        self.scheduler = self._server("kube-scheduler", self._scheduler_options())
        self.kubeconfig = self.write_kubeconfig("admin", token=self._tokens["admin"])

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    def kubectl(self, namespace: str = "") -> Kubectl:
        cache = self.directory / "kubectl-cache"
        return Kubectl(self.binaries.path("kubectl"), self.kubeconfig, cache, namespace)

    def start(self) -> None:
        """Return when pods can be created."""
        self.etcd.start()
        self.etcd.wait_ready(self._etcd_answers, timeout_s=START_TIMEOUT_S)
        self.start_api_server()
        self.controller_manager.start()
        self.scheduler.start()
        until(
            self._pods_can_be_created,
            "the default service account",
            timeout_s=START_TIMEOUT_S,
            last=self.controller_manager.tail,
        )

    def start_api_server(self) -> None:
        """Return when it answers; also after it was killed."""
        self.api_server.start()
        self.api_server.wait_ready(self.answers, timeout_s=START_TIMEOUT_S)

    def kill_api_server(self) -> None:
        self.api_server.kill()

    def answers(self) -> bool:
        return self.request("/readyz") == b"ok"

    def request(self, path: str) -> bytes | None:
        """GET as the administrator; None without a 2xx response."""
        request = urllib.request.Request(
            f"{self.url}{path}", headers={"Authorization": f"Bearer {self._tokens['admin']}"}
        )
        context = ssl.create_default_context(cafile=str(self.authority.file))
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as reply:
                return bytes(reply.read())
        except (urllib.error.URLError, OSError):
            return None

    def _etcd_answers(self) -> bool:
        try:
            url = f"http://{LOOPBACK}:{self._client_port}/health"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return bool(json.load(reply)["health"] == "true")
        except (urllib.error.URLError, OSError):
            return False

    def _pods_can_be_created(self) -> bool:
        return self.request("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def write_kubeconfig(
        self, name: str, *, token: str | None = None, pair: Pair | None = None
    ) -> Path:
        """A kubeconfig for one user, by token or by client certificate."""
        user: dict[str, str] = {"token": token} if token else {}
        if pair:
            user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "rig",
                    "cluster": {
                        "server": self.url,
                        "certificate-authority": str(self.authority.file),
                    },
                }
            ],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": name}}],
            "current-context": "rig",
        }
        path = self.directory / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
        return path

    def _write_tokens(self) -> None:
        lines = [
            f'{self._tokens[name]},{user},{name},"{group}"' for name, (user, group) in USERS.items()
        ]
        path = self.directory / "tokens.csv"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines) + "\n")

    def _server(self, name: str, options: list[str]) -> Server:
        limits = {"GOMAXPROCS": CORES, "GOMEMLIMIT": self.settings.go_memory}
        return Server(self.run, name, [self.binaries.path(name), *options], environment=limits)

    def _etcd_options(self) -> list[str]:
        client = f"http://{LOOPBACK}:{self._client_port}"
        peer = f"http://{LOOPBACK}:{self._peer_port}"
        return [
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # a test's data need not survive a power cut
            "--log-level=warn",
        ]

    def _api_server_options(self, services: str) -> list[str]:
        hosts = (self.address, LOOPBACK, "localhost", "kubernetes.default.svc")
        serving = self.authority.sign("api-server", "kube-apiserver", hosts=hosts)
        to_kubelets = self.authority.sign(
            "to-kubelets", "kube-apiserver-kubelet-client", organization="system:masters"
        )
        accounts = write_signing_pair(self.directory, "service-accounts")
        return [
            f"--etcd-servers=http://{LOOPBACK}:{self._client_port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self.port}",
            "--endpoint-reconciler-type=none",  # a loopback address may not be published
            f"--service-cluster-ip-range={services}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.file}",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            f"--kubelet-client-certificate={to_kubelets.certificate}",
            f"--kubelet-client-key={to_kubelets.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts.certificate}",
            f"--service-account-signing-key-file={accounts.key}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--profiling=false",
            *self.settings.api_server,
        ]

    def _controller_manager_options(self) -> list[str]:
        config = self.write_kubeconfig(
            "controller-manager", token=self._tokens["controller-manager"]
        )
        return [
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",  # unused
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.directory / 'service-accounts.key'}",
            f"--root-ca-file={self.authority.file}",
            *self.settings.controller_manager,
        ]

    def _scheduler_options(self) -> list[str]:
        config = self.write_kubeconfig("scheduler", token=self._tokens["scheduler"])
        return [
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",
            *self.settings.scheduler,
        ]
