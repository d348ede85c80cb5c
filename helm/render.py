"""Generates the chart's copy of the CRD and its version, and manifests/ from the chart.

    python -m helm.render

Needs helm (`make kubernetes-binaries` builds it). The tests in tests/tidy also find outdated files
without helm, by the digest of the chart in manifests/.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from holdfast.orchestrator.kube.pod_schema import definition_text
from holdfast.orchestrator.limits import RELEASE

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "holdfast"
CRD = CHART / "files" / "crd.yaml"
MANIFESTS = ROOT / "manifests"
NAMESPACE = "holdfast-system"
OLDEST = "1.30.0"
"""The oldest Kubernetes that the chart supports."""
HEAD = "# Rendered from helm/holdfast by `make manifests`; do not edit.\n"

NAMESPACE_TEXT = f"""apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/part-of: holdfast
    pod-security.kubernetes.io/enforce: restricted
"""
KUSTOMIZATION = """# chart: {digest}
#
# All namespaces, no monitoring; use the chart for anything else. Replace both images by yours: that
# of the operator, and that of jobs in the argument --worker-image.
# docs/operations/kubernetes.md shows the patch.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
{resources}"""


def chart_digest() -> str:
    """Digest of the names and contents of all files of the chart."""
    digest = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(CHART)}\0{len(path.read_bytes())}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def template(helm: Path | str, *options: str) -> str:
    """The output of `helm template`. Raises CalledProcessError."""
    command = [
        str(helm), "template", "holdfast", str(CHART), "--namespace", NAMESPACE,
        "--kube-version", OLDEST, *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def manifests(helm: Path | str) -> dict[str, str]:
    """File names and contents of manifests/."""
    texts: dict[str, list[str]] = {}
    for document in template(helm, "--skip-tests").split("\n---\n"):
        source = document.partition("# Source: holdfast/templates/")[2].splitlines()[0].strip()
        body = "\n".join(
            line for line in document.splitlines() if not line.startswith(("# Source:", "---"))
        )
        body = body.replace("managed-by: Helm", "managed-by: kubectl").strip()
        if body:
            texts.setdefault(source, []).append(body)
    files = {"namespace.yaml": HEAD + NAMESPACE_TEXT}
    for source in sorted(texts):
        files[source] = HEAD + "\n---\n".join(texts[source]) + "\n"
    resources = "".join(f"  - {name}\n" for name in sorted(files))
    files["kustomization.yaml"] = HEAD + KUSTOMIZATION.format(
        digest=chart_digest(), resources=resources
    )
    return files


def main() -> None:
    from tests.e2e.kubernetes.rig.binaries import locate

    CRD.write_text(definition_text())
    about = CHART / "Chart.yaml"
    version = re.compile(r"^(version|appVersion): .*", re.MULTILINE)
    about.write_text(version.sub(rf'\1: "{RELEASE}"', about.read_text()))
    helm = locate().find("helm")
    if helm is None:
        sys.exit("helm: not found; run `make kubernetes-binaries`, or put it on PATH")
    MANIFESTS.mkdir(exist_ok=True)
    files = manifests(helm)
    for path in MANIFESTS.glob("*.yaml"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (MANIFESTS / name).write_text(text)
        print(f"manifests/{name}")


if __name__ == "__main__":
    main()
