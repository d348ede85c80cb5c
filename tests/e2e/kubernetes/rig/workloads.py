"""Pod documents that tests of the rig start. Owns no process; the operator makes its own pods."""

from __future__ import annotations

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
                    "image": images.HOLDFAST,
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


def phase(document: Document | None) -> str:
    return str(((document or {}).get("status") or {}).get("phase", ""))
