"""Documents for tests: pods of the worker image, and shared storage."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.kubernetes.rig import images
from tests.e2e.kubernetes.rig.kubectl import Document


def pod(name: str, *command: str, node: str = "") -> Document:
    """A pod of the Holdfast image that satisfies the restricted pod security standard."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": images.image("worker"),
                    "imagePullPolicy": "Never",
                    "command": list(command),
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
        },
    }


def shared_storage(volume_name: str, directory: Path, claim_name: str) -> list[Document]:
    """A volume that all nodes can write to, and a claim on it.

    Volumes have no namespace, so the name has to be unique in the cluster.
    """
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    common = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(directory)},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name},
        "spec": {
            **common,
            "volumeName": volume_name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    return [volume, claim]


def phase(document: Document | None) -> str:
    return str(((document or {}).get("status") or {}).get("phase", ""))
