"""A cluster that somebody else runs, named by HOLDFAST_TEST_KUBECONFIG: used, never started or
stopped. Owns nothing of it but the namespaces that tests make."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.kubernetes.rig.binaries import Binaries
from tests.e2e.kubernetes.rig.kubectl import Kubectl

VARIABLE = "HOLDFAST_TEST_KUBECONFIG"


@dataclass(frozen=True)
class GivenCluster:
    """What tests of API behaviour need of a control plane."""

    binaries: Binaries
    kubeconfig: Path
    cache: Path

    def kubectl(self, namespace: str = "") -> Kubectl:
        return Kubectl(self.binaries.path("kubectl"), self.kubeconfig, self.cache, namespace)


def given(binaries: Binaries, cache: Path) -> GivenCluster | None:
    """None: nobody has named one."""
    named = os.environ.get(VARIABLE)
    return GivenCluster(binaries, Path(named), cache) if named else None
