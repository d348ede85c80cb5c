"""The configuration of containerd, kubelet and the CNI plugins of a node, as documents. Pure.

Each setting that differs from the default has its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.kubernetes.rig import dns, images

CONTAINERD = """\
version = 2
root = "{root}"
state = "/run/containerd"
oom_score = 0

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_tcp_service = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  # Without CAP_SYS_RESOURCE lowering the score of a process is not permitted, and runc fails.
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{directory}/cni"

  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{directory}/registries"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{directory}/base-spec.json"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
"""


def containerd(directory: Path, *, plugins: Path, runc: Path, root: Path) -> str:
    places = {"directory": directory, "plugins": plugins, "runc": runc, "root": root}
    return CONTAINERD.format(pause=images.PAUSE, **places)


def cni(subnet: str, first: str, last: str) -> dict[str, Any]:
    """Pods are ports of the node's bridge; each node has a range of addresses."""
    return {
        "cniVersion": "1.0.0",
        "name": "rig",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": False,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": subnet, "rangeStart": first, "rangeEnd": last}]],
                },
            }
        ],
    }


def kubelet(
    address: str, name_server: str, authority: Path, changes: Mapping[str, object]
) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # The disk belongs to the machine, so the node must not evict pods because it is full.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "100Mi"},
        "makeIPTablesUtilChains": False,
        # A watch that is refused once (the authorizer has not seen the pod yet) is retried after up
        # to 30 s, and the pod waits that long for its volumes.
        "configMapAndSecretChangeDetectionStrategy": "Get",
        "healthzPort": 0,
        "clusterDNS": [name_server],
        "clusterDomain": dns.DOMAIN,
        "resolvConf": "",  # not the names of this machine
        "maxPods": 100,
        **changes,
    }


def base_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The runtime's default, plus the mounts of images.binds()."""
    binds = [
        {
            "destination": place,
            "type": "bind",
            "source": str(directory),
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for place, directory in images.binds().items()
    ]
    return {**spec, "mounts": [*spec["mounts"], *binds]}
