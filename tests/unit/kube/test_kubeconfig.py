"""Messages about unusable kubeconfigs and clusters without the CRD."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.kube.errors import refused
from holdfast.orchestrator.kube.kubeconfig import problem

CONFIG = """\
apiVersion: v1
kind: Config
contexts: [{name: red, context: {}}, {name: blue, context: {}}]
current-context: green
"""


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        (CONFIG, "pink", "--context: got pink; expected one of red, blue in "),
        (CONFIG, None, "current-context of the kubeconfig is green; expected one of red, blue"),
        (CONFIG, "red", ""),
        ("contexts: 7", None, "which is not a kubeconfig; expected a kubeconfig in YAML"),
        ("- [", None, "which is not a kubeconfig; expected a kubeconfig in YAML"),
        ("", "red", "--context: got red; expected a context (there is none) in "),
        (None, None, "(no such file); expected a kubeconfig; name one with --kubeconfig"),
    ],
    ids=["unknown", "current", "fine", "words", "garbage", "empty", "missing"],
)
def test_an_unusable_kubeconfig_is_reported_with_its_problem(
    text: str | None, context: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    found = problem(context, path)
    assert message in str(found) if message else found is None


def test_a_kubeconfig_in_the_home_of_an_unknown_user_does_not_exist() -> None:
    assert "got ~no-such-user/config (no such file)" in str(problem(None, "~no-such-user/config"))


def test_a_wrong_kubeconfig_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert str(problem(None, None)).startswith(f"$KUBECONFIG: got {tmp_path / 'a'}:{tmp_path}/b")
    (tmp_path / "b").write_text(CONFIG.replace("green", "red"))
    assert problem(None, None) is None, "one existing file is enough"


@pytest.mark.parametrize(
    "body", [b"404 page not found\n", b'{"message": "the server could not find the requested"}']
)
def test_a_cluster_without_the_crd_says_what_to_install(body: bytes) -> None:
    path = "/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs"
    error = refused("https://h:1", "list", path, 404, body)
    assert "does not serve trainingjobs.holdfast.dev" in str(error) and "helm" in str(error)
    assert error.exit_code == 2


def test_a_kubeconfig_that_is_a_directory_is_reported_as_one(tmp_path: Path) -> None:
    assert f"--kubeconfig: got {tmp_path} (a directory)" in str(problem(None, tmp_path))


@pytest.mark.parametrize("text", ["a: 2024-13-45", 3000 * "["], ids=["no date", "deep"])
def test_a_file_that_cannot_be_parsed_is_not_a_kubeconfig(text: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    assert "which is not a kubeconfig" in str(problem(None, tmp_path / "config"))
