"""An existing cluster, named by HOLDFAST_TEST_KUBECONFIG. Tests only add namespaces and CRDs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.kubernetes.rig.binaries import Binaries
from tests.e2e.kubernetes.rig.kubectl import Kubectl

VARIABLE = "HOLDFAST_TEST_KUBECONFIG"


@dataclass(frozen=True)
class GivenCluster:
    """The part of a control plane that tests of the API need."""

    binaries: Binaries
    kubeconfig: Path
    cache: Path

    def kubectl(self, namespace: str = "") -> Kubectl:
        return Kubectl(self.binaries.path("kubectl"), self.kubeconfig, self.cache, namespace)


def given(binaries: Binaries, cache: Path) -> GivenCluster | None:
    """None if the variable is not set."""
    named = os.environ.get(VARIABLE)
    return GivenCluster(binaries, Path(named), cache) if named else None
