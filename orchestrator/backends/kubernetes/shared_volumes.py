"""A pod's part of the volumes that the operator gives to all jobs: the job's own directory of the
checkpoints, the namespace's directory of the compile caches. Pure.

A template may mount the same directory elsewhere, and nothing else of these volumes: they hold what
other jobs trained, and code that pods of other namespaces would run.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.orchestrator.errors import UserError

CHECKPOINTS = "checkpoints"
"""The name of the volume in a pod."""
CACHE = "compile-cache"
CACHE_DIRECTORY = "/var/cache/holdfast"
"""Path at which a pod mounts it."""
TEMPLATE = "spec.kubernetes.podTemplate.spec"


@dataclass(frozen=True)
class SharedVolume:
    """One of these volumes, and the part of it that a job gets."""

    name: str
    source: Mapping[str, Any]
    """A volume source, such as {"persistentVolumeClaim": {"claimName": "checkpoints"}}; empty:
    there is no such volume."""
    mount: Mapping[str, Any]
    """Empty: the job gets nothing of it."""
    others: str
    """Other content of the volume, for a message."""

    @property
    def document(self) -> dict[str, Any]:
        """The entry of the pod's `volumes`."""
        return {"name": self.name, **self.source}


def checkpoints(source: Mapping[str, Any], root: str, own: str, path: str) -> SharedVolume:
    """Volume with the directory `own`, NAMESPACE/NAME, at the path where the operator has it;
    without one if the job's checkpoints are elsewhere. `root`: where the operator mounts the
    volume. The operator creates the directory before the pods: the kubelet follows links in a
    subPath."""
    place = posixpath.join(posixpath.normpath(root), own)
    is_here = bool(source) and posixpath.normpath(path.removeprefix("file://")) == place
    mount = {"name": CHECKPOINTS, "mountPath": place, "subPath": own} if is_here else {}
    return SharedVolume(CHECKPOINTS, source, mount, "the checkpoints of other jobs")


def compile_cache(source: Mapping[str, Any], namespace: str) -> SharedVolume:
    """The volume with the directory of the namespace, which the kubelet creates with the mode of
    the volume's own directory."""
    mount = {"name": CACHE, "mountPath": CACHE_DIRECTORY, "subPath": namespace} if source else {}
    return SharedVolume(CACHE, source, mount, "what pods of other namespaces compile and run")


def check(spec: Mapping[str, Any], volumes: Iterable[SharedVolume]) -> None:
    """The pod, with its template, reaches no other part. Raises UserError."""
    for shared in volumes:
        if shared.source:
            _check_sources(spec, shared)
            _check_mounts(spec, shared)


def _check_sources(spec: Mapping[str, Any], shared: SharedVolume) -> None:
    for volume in spec.get("volumes") or ():
        source = {name: value for name, value in volume.items() if name != "name"}
        ours = volume.get("name") == shared.name and bool(shared.mount)
        if (ours and source != shared.source) or (not ours and _same(source, shared.source)):
            expected = f"a volume of your own: this one holds {shared.others} too"
            got = f"{volume.get('name')} with {json.dumps(source)}"
            raise UserError.of(f"{TEMPLATE}.volumes", got, expected, "use another claim")


def _check_mounts(spec: Mapping[str, Any], shared: SharedVolume) -> None:
    own = shared.mount.get("subPath", "")
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind) or ():
            for mount in container.get("volumeMounts") or ():
                where = (mount.get("subPath", ""), mount.get("subPathExpr", ""))
                if shared.mount and mount.get("name") == shared.name and where != (own, ""):
                    got = f"{shared.name} with the subPath {where[1] or where[0] or 'nothing'}"
                    raise UserError.of(
                        f"{TEMPLATE}.{kind}.volumeMounts", got, f"the directory of this job ({own})"
                    )


def _same(source: Mapping[str, Any], volume: Mapping[str, Any]) -> bool:
    """Whatever the fields that only say how it is mounted, such as readOnly."""
    for kind, ours in volume.items():
        theirs = source.get(kind)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = set(ours) - {"readOnly"}
            if all(theirs.get(name) == ours[name] for name in names):
                return True
    return False
