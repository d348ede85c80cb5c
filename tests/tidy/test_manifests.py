"""Spec, CRD, chart, manifests, images and docs agree with each other."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import ray_dashboard, render
from holdfast import __version__
from holdfast.orchestrator.hosts.kubernetes.metrics import JOB_METRICS, OPERATOR_METRICS
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.pod_schema import definition_text
from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from images import build
from tests.e2e.kubernetes.rig.binaries import locate
from tools.metrics_page import ALERTS

FIX = "run: make manifests"
TEMPLATES = render.CHART / "templates"


def documents() -> list[dict[str, Any]]:
    """Everything that `kubectl apply -k manifests/` applies."""
    listed = yaml.safe_load((render.MANIFESTS / "kustomization.yaml").read_text())["resources"]
    return [
        document
        for name in listed
        for document in yaml.safe_load_all((render.MANIFESTS / name).read_text())
    ]


def of_kind(kind: str, name: str = "") -> dict[str, Any]:
    found = [d for d in documents() if d["kind"] == kind and d["metadata"]["name"].endswith(name)]
    assert len(found) == 1, (kind, name)
    return found[0]


def test_the_crd_of_the_chart_is_generated_from_the_models() -> None:
    assert render.CRD.read_text() == definition_text(), FIX
    assert of_kind("CustomResourceDefinition") == yaml.safe_load(definition_text()), FIX


def test_the_manifests_carry_the_digest_of_this_chart() -> None:
    """Works without helm."""
    carried = (render.MANIFESTS / "kustomization.yaml").read_text()
    assert f"# chart: {render.chart_digest()}\n" in carried, FIX


def test_helm_renders_the_same_manifests() -> None:
    helm = locate().find("helm")
    if helm is None:
        pytest.skip("helm not found; `make kubernetes-binaries` builds it")
    stored = {path.name: path.read_text() for path in render.MANIFESTS.glob("*.yaml")}
    assert stored == render.manifests(helm), FIX


def test_every_value_of_the_chart_is_in_its_schema_and_in_a_template() -> None:
    values = yaml.safe_load((render.CHART / "values.yaml").read_text())
    schema = json.loads((render.CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    text = "".join(path.read_text() for path in TEMPLATES.rglob("*") if path.is_file())
    assert [name for name in values if f".Values.{name}" not in text] == []


def queries() -> Iterator[str]:
    dashboard = json.loads((render.CHART / "files" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable.get("definition", "")
    text = (TEMPLATES / "monitoring.yaml").read_text()
    yield from re.findall(r"expr: (?:>-\n)?(.*?)\n          (?:for|labels):", text, re.DOTALL)


def test_dashboard_and_alerts_query_existing_metrics_and_labels() -> None:
    known = {spec.name: {"namespace", "job", *spec.labels} for spec in JOB_METRICS}
    for spec in JOB_METRICS:
        if spec.kind == "summary":
            known |= {f"{spec.name}_{end}": known[spec.name] for end in ("sum", "count")}
    known |= {own.name: set(own.labels) for own in OPERATOR_METRICS}
    used = list(queries())
    assert len([query for query in used if "holdfast_" in query]) > 30
    for query in used:
        for name, labels in re.findall(r"(holdfast_\w+)(?:\{([^}]*)\})?", query):
            assert name in known, query
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", labels)) <= known[name], query
        for group in re.findall(r"\b(?:by|on) ?\(([\w, ]+)\)", query):
            labels = {label for names_ in known.values() for label in names_}
            assert {label.strip() for label in group.split(",")} <= labels, query


def test_every_alert_of_the_chart_is_explained_in_the_docs() -> None:
    """Compares names, severities and thresholds."""
    text = (TEMPLATES / "monitoring.yaml").read_text()
    alerts = re.findall(r"- alert: (\w+)\n.*?labels: \{severity: (\w+)\}", text, re.DOTALL)
    assert alerts and alerts == [(one.name, one.severity) for one in ALERTS]
    values = yaml.safe_load((render.CHART / "values.yaml").read_text())["metrics"]["prometheusRule"]
    conditions = " ".join(one.when for one in ALERTS)
    for name in ("restartsInHalfAnHour", "checkpointAgeSeconds", "goodputRatio"):
        assert f"`{name}` ({values[name]})" in conditions
        assert f".{name}" in text


def test_the_dashboard_shows_the_most_important_metrics() -> None:
    shown = " ".join(queries())
    for name in (
        "holdfast_goodput_ratio", "holdfast_step_duration_seconds", "holdfast_job_restarts_total",
        "holdfast_job_recovery_duration_seconds_sum", "holdfast_checkpoint_age_seconds",
    ):  # fmt: skip
        assert name in shown


def test_the_dashboard_for_ray_is_that_of_the_chart_with_the_names_of_rays_exporter() -> None:
    text = ray_dashboard.TARGET.read_text()
    assert text == ray_dashboard.text(), FIX
    exported = {f"ray_{spec.name}" for spec in METRICS if not spec.per_rank}
    for spec in METRICS:
        if spec.kind == "summary":
            exported |= {f"ray_{spec.name}_{end}" for end in ("sum", "count")}
    used = set(re.findall(r"(?:ray_)*holdfast_\w+", text))
    assert len(used) > 20 and used <= exported
    assert "namespace" not in text


@pytest.mark.parametrize(
    "path", [render.CHART / "files" / "dashboard.json", ray_dashboard.TARGET], ids=["chart", "ray"]
)
def test_panels_of_the_dashboard_have_unique_ids_and_do_not_overlap(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_chart_and_operator_use_the_same_labels_and_annotations() -> None:
    policy = of_kind("ValidatingAdmissionPolicy", "-jobs")
    known = next(v["expression"] for v in policy["spec"]["variables"] if v["name"] == "known")
    ours = {names.CANCEL, names.REQUEST}
    assert set(re.findall(r"'([^']+)'", known)) == ours
    network = of_kind("NetworkPolicy")["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert network == {"matchLabels": {names.LABEL_ROLE: names.ROLE_NODE}}


def test_the_rights_of_the_operator_are_documented() -> None:
    """docs/operations/security.md: one row per resource, `| resource | verbs | why |`."""
    page = (render.ROOT / "docs/operations/security.md").read_text()
    table = page.partition("## What the operator may do")[2].partition("\n## ")[0]
    documented = {
        resource: {verb.strip() for verb in verbs.split(",")}
        for resource, verbs in re.findall(r"^\| `([\w./-]+)` \| ([\w, ]+) \|", table, re.MULTILINE)
    }
    rules = of_kind("ClusterRole", "-operator")["rules"] + of_kind("Role", "-lease")["rules"]
    allowed = {
        f"{resource}.{group}".rstrip("."): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert documented == allowed
    assert not any("*" in verbs for verbs in allowed.values())


def test_the_operators_pod_has_no_privileges() -> None:
    spec = of_kind("Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"agents": 7077, "http": 8080}
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_operator_has_the_options_that_the_chart_sets() -> None:
    given = set(re.findall(r"--([a-z-]+)=", (TEMPLATES / "deployment.yaml").read_text()))
    known = (render.ROOT / "orchestrator" / "cli" / "commands" / "operator.py").read_text()
    assert given and [name for name in given if f'"--{name}"' not in known] == []


def test_the_chart_has_the_version_of_the_program_and_of_the_images() -> None:
    chart = yaml.safe_load((render.CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {__version__}, FIX


# -- images ------------------------------------------------------------------------------------
IMAGES = ("operator", "worker")
# Image -> folders whose libraries it installs, but for these: parts that the image does not run.
INSTALLED = {
    "operator": (("orchestrator",), {
        "jinja2", "markupsafe", "opentelemetry", "psutil", "ray", "starlette", "uvicorn",
    }),
    "worker": (("orchestrator", "workers"), {
        "accelerate", "cryptography", "kubernetes", "lightning", "opentelemetry", "peft", "ray",
        "starlette", "torchtitan", "transformers", "uvicorn",
    }),
}  # fmt: skip


@pytest.mark.parametrize("image", IMAGES)
def test_a_dockerfile_is_what_the_list_of_files_gives(image: str) -> None:
    text = (render.ROOT / "images" / image / "Dockerfile").read_text()
    assert text == build.dockerfile(image, __version__), "python -m images.build --dockerfiles"
    for source in re.findall(r"^COPY (?!--from)(\S+) \S+$", text, re.MULTILINE):
        assert (render.ROOT / source).exists(), source
    assert re.search(r":\d+\.\d+-", build.FACTS["base"]), "the base has a version"
    commands = re.findall(r"^(?:RUN|CMD|ENTRYPOINT) (.*)$", text, re.MULTILINE)
    assert all(isinstance(json.loads(command), list) for command in commands), "without a shell"


def locked(image: str) -> list[str]:
    """The distributions in its lock, each with one version and its hashes."""
    text = (render.ROOT / "images" / image / "requirements.txt").read_text()
    entry = re.compile(
        r"^([\w.-]+)==[\w.]+ \\\n(?:    --hash=sha256:\w{64}(?: \\)?\n)+|^#.*\n", re.MULTILINE
    )
    assert entry.sub("", text) == ""
    return [name for name in entry.findall(text) if name]


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_no_contradictions(image: str) -> None:
    """pip and uv refuse one when they install it, with the metadata of the packages."""
    assert ("torch" in locked(image)) == (image == "worker")
    uv = Path(sys.executable).with_name("uv")
    lock = f"images/{image}/requirements.txt"
    done = subprocess.run(
        [uv, "pip", "compile", "--quiet", "--python-version", "3.11", lock],
        cwd=render.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Failed to fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_the_libraries_that_its_code_imports(image: str) -> None:
    folders, left_out = INSTALLED[image]
    found = {"yaml": "pyyaml", "pydantic_core": "pydantic"}
    wanted = set[str]()
    for path in [path for folder in folders for path in (render.ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                wanted.add(str(node.module).partition(".")[0])
    wanted -= {"holdfast", *sys.stdlib_module_names}
    names = {name: found.get(name, name.replace("_", "-")) for name in wanted}
    missing = {name for name in wanted if names[name] not in locked(image)}
    assert missing == left_out
