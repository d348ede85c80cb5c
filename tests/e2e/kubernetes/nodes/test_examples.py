"""The examples in pods, by the lines of the quickstart."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.kubernetes.commands import HoldfastCli
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.pages import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs/user/quickstart-kubernetes.md").read_text()
_INSTALL, KUBECTL, LINES = blocks(PAGE, "bash")


def test_the_recipe_is_applied_awaited_and_deleted_as_printed(
    operator: Operator, cluster_namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.ensure_running()
    monkeypatch.chdir(ROOT)
    for line in KUBECTL:
        program, *words = shlex.split(line)
        assert program == "kubectl"
        shown = cluster_namespace.run(*words, timeout_s=660)
        if words[0] == "get":
            assert "running" in shown
    assert cluster_namespace.get("tj", "stdlib-bytes") is None


@pytest.mark.parametrize("line", LINES)
def test_an_example_trains_as_printed(
    line: str,
    operator: Operator,
    cluster_namespace: Kubectl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "frameworks" in line:
        pytest.importorskip("transformers", reason="`make test-frameworks` runs this test")
    operator.ensure_running()
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    assert (words.pop(0), words.pop()) == ("holdfast", "--kubernetes")
    output = tmp_path / "output"
    code = HoldfastCli(cluster_namespace).start(output, *words).wait(400)
    text = output.read_text()
    assert code == 0 and re.search(r"^4 workers.*; generation 1", text, re.MULTILINE), text
