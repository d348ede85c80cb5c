"""Runs kubectl as a user would, and reads objects."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kubernetes.rig.api_reader import reader_of
from tests.e2e.kubernetes.rig.waiting import until

Document = dict[str, Any]


class Refused(AssertionError):
    """kubectl or the API server refused; the text is their message."""


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
        """The result, also of a failure."""
        return subprocess.run(
            self.command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def refusal(self, *words: str, stdin: str | None = None) -> str:
        done = self.attempt(*words, stdin=stdin)
        assert done.returncode != 0, f"accepted: {done.stdout}"
        return done.stderr

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
        """An object, or None if it does not exist."""
        found = self._read(kind, name)
        if found is not None:
            return found if "metadata" in found else None
        done = self.attempt("get", kind, name, "--ignore-not-found", "--output=json")
        if done.returncode:
            raise Refused(f"kubectl get {kind} {name}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def list(self, kind: str, selector: str = "") -> list[Document]:
        found = self._read(kind, query=f"?labelSelector={urllib.parse.quote(selector)}")
        if found is None:
            found = self.json("get", kind, f"--selector={selector}")
        items: list[Document] = found["items"]
        return items

    def _read(self, kind: str, name: str = "", query: str = "") -> Document | None:
        """The object or list over HTTP; {} if it does not exist; None where kubectl has to ask."""
        reader = reader_of(self.kubeconfig)
        if reader is None:
            return None
        try:
            path = reader.path(kind, self.namespace or "default", name)
            if path is None:
                return None
            status, document = reader.read(path + query)
        except OSError as error:
            raise Refused(f"get {kind} {name}: {error}") from error
        message = str(document.get("message", status))
        if "could not find the requested resource" in message:
            reader.forget(kind)
            return None
        if status == 404 and name:
            return {}
        if status != 200:
            raise Refused(f"get {kind} {name}: {message}")
        return document

    def wait(
        self,
        kind: str,
        name: str,
        true_of: Callable[[Document | None], bool],
        what: str,
        *,
        timeout_s: float = 90,
    ) -> Document:
        """Wait until this is true of the object, which is None while it does not exist."""
        seen: Document | None = None

        def look() -> bool:
            nonlocal seen
            seen = self.get(kind, name)
            return true_of(seen)

        until(
            look,
            f"{kind} {name} {what}",
            timeout_s=timeout_s,
            last=lambda: (seen or {}).get("status", "no such object"),
        )
        return seen or {}

    def served(self, *names: str) -> None:
        """Wait until the API serves these CRDs; `kubectl wait` fails on one without a status."""
        for name in names:
            self.wait("crd", name, lambda d: condition(d, "Established") == "True", "to be served")


def condition(document: Document | None, kind: str) -> str:
    """The status of a condition: "True", "False", "Unknown", or "" if it is absent."""
    for found in ((document or {}).get("status") or {}).get("conditions") or ():
        if found["type"] == kind:
            return str(found["status"])
    return ""
