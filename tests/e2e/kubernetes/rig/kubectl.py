"""Runs kubectl as a person would, and reads what it prints as JSON.

Owns the command line; holds no state but which cluster and namespace it speaks to.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kubernetes.rig.waiting import until

Document = dict[str, Any]


class Refused(AssertionError):
    """kubectl said no; the text is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a kubeconfig and, usually, a namespace."""

    program: Path
    kubeconfig: Path
    cache: Path
    namespace: str = ""

    def inside(self, namespace: str) -> Kubectl:
        return dataclasses.replace(self, namespace=namespace)

    def command(self, *words: str) -> list[str]:
        where = ["--kubeconfig", str(self.kubeconfig), "--cache-dir", str(self.cache)]
        where += ["--namespace", self.namespace] if self.namespace else []
        return [str(self.program), *where, *words]

    def attempt(
        self, *words: str, stdin: str | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """The result, whatever it is."""
        return subprocess.run(
            self.command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        done = self.attempt(*words, stdin=stdin, timeout_s=timeout_s)
        if done.returncode:
            raise Refused(f"kubectl {' '.join(words)}: {done.stderr.strip() or done.stdout}")
        return done.stdout

    def json(self, *words: str) -> Document:
        found: Document = json.loads(self.run(*words, "--output=json"))
        return found

    def apply(self, *documents: Document | Path, force: bool = False) -> None:
        """Server-side apply, as the rest of the project does it."""
        forced = ["--force-conflicts"] if force else []
        for document in documents:
            text = document.read_text() if isinstance(document, Path) else yaml.safe_dump(document)
            self.run("apply", "--server-side", *forced, "--filename=-", stdin=text)

    def create(self, document: Document) -> Document:
        text = yaml.safe_dump(document)
        made: Document = json.loads(self.run("create", "--filename=-", "--output=json", stdin=text))
        return made

    def get(self, kind: str, name: str) -> Document | None:
        """An object, or None when there is none of that name."""
        done = self.attempt("get", kind, name, "--ignore-not-found", "--output=json")
        if done.returncode:
            raise Refused(f"kubectl get {kind} {name}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def list(self, kind: str, selector: str = "") -> list[Document]:
        items: list[Document] = self.json("get", kind, f"--selector={selector}")["items"]
        return items

    def wait(
        self,
        kind: str,
        name: str,
        true_of: Callable[[Document | None], bool],
        what: str,
        *,
        timeout_s: float = 60,
    ) -> Document:
        """Waits until this is true of the object, which is None while there is none."""
        seen: Document | None = None

        def look() -> bool:
            nonlocal seen
            seen = self.get(kind, name)
            return true_of(seen)

        until(
            look,
            f"{kind} {name} {what}",
            timeout_s=timeout_s,
            every_s=0.2,
            last=lambda: (seen or {}).get("status", "no such object"),
        )
        return seen or {}

    def served(self, *names: str) -> None:
        """Waits until the API server knows these definitions (CRDs). Not by `kubectl wait`, which
        fails on a definition that has no status yet."""
        for name in names:
            self.wait("crd", name, lambda d: condition(d, "Established") == "True", "to be served")


def condition(document: Document | None, kind: str) -> str:
    """The status of a condition: "True", "False", "Unknown", or "" when it is not there."""
    for found in ((document or {}).get("status") or {}).get("conditions") or ():
        if found["type"] == kind:
            return str(found["status"])
    return ""
