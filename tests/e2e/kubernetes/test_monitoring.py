"""The chart's Prometheus resources against the CRDs of the Prometheus operator, and its alerts
against the metrics of a Holdfast operator.

Prometheus itself does not run: promtool parses the rules and evaluates them over series minute by
minute.
"""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from helm import ray_dashboard, render
from holdfast.orchestrator.hosts.kubernetes.metrics import OperatorState, exposition
from holdfast.orchestrator.runtime.observe.view import (
    CheckpointView,
    IncidentCount,
    JobPhase,
    JobView,
)
from tests.e2e.kubernetes.published import get as published
from tests.e2e.kubernetes.published import promtool
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.test_chart import Helm, chart, program, rendered

pytestmark = pytest.mark.e2e
__all__ = ["chart", "program"]

Document = dict[str, Any]
KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
RED = ("red", "llm")
MINUTE = 60_000_000_000
DASHBOARD = render.CHART / "files" / "dashboard.json"


@pytest.fixture
def documents(chart: Helm) -> dict[str, Document]:
    """Kind -> document of the chart with all values set."""
    names = ("serviceMonitor", "podMonitor", "prometheusRule")
    options = [f"metrics.{name}.enabled=true,metrics.{name}.labels.release=kps" for name in names]
    found = {one["kind"]: one for one in rendered(chart, "--set", ",".join(options))}
    return {kind: found[kind] for kind in KINDS}


# -- resources ---------------------------------------------------------------------------------
@pytest.fixture
def definitions(control_plane: Any, namespace: Kubectl) -> Kubectl:
    """A cluster with the published CRDs."""
    if refusal := published.refusal():
        pytest.skip(refusal)
    files = published.files(published.MONITORING)
    kubectl = control_plane.kubectl()
    for file in files:
        kubectl.run("apply", "--server-side", "--filename", str(file))
    kubectl.served(*(yaml.safe_load(file.read_text())["metadata"]["name"] for file in files))
    return namespace


@pytest.mark.parametrize("kind", KINDS)
def test_resources_of_the_chart_match_the_published_crds(
    definitions: Kubectl, documents: dict[str, Document], kind: str
) -> None:
    """Strictly: unknown fields are refused."""
    document = copy.deepcopy(documents[kind])
    document["metadata"]["namespace"] = definitions.namespace
    words = ("apply", "--server-side", "--validate=strict", "--filename=-")
    definitions.run(*words, stdin=yaml.safe_dump(document))
    stored = definitions.json("get", f"{kind.lower()}s.monitoring.coreos.com", "holdfast")
    assert stored["spec"] == document["spec"], "nothing was dropped or filled in"
    assert stored["metadata"]["labels"]["release"] == "kps"
    wrong = {**document, "spec": {**document["spec"], "endpoint": []}}
    refused = definitions.attempt(*words, stdin=yaml.safe_dump(wrong))
    assert refused.returncode != 0 and "endpoint" in refused.stderr


# -- alerts ------------------------------------------------------------------------------------
class Rules:
    """The chart's alerts, checked and evaluated by promtool."""

    def __init__(self, rule: Document, directory: Path) -> None:
        found = promtool.find()
        assert found is not None
        self._program, self._directory = found, directory
        self._alerts = {one["alert"]: one for g in rule["spec"]["groups"] for one in g["rules"]}
        self.file = directory / "rules.yaml"
        self.file.write_text(yaml.safe_dump(rule["spec"]))

    def promtool(self, *words: str) -> str:
        command = [str(self._program), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def expect(
        self,
        history: Callable[[int], OperatorState],
        minutes: int,
        alert: str,
        *,
        handover: int = 10_000,
        **firing: str | None,
    ) -> None:
        """`firing`: m12="7m" -> at minute 12 the alert fires with the value 7m; None: it does not.
        At minute `handover` another operator pod starts to lead and to export jobs."""
        tests = [
            {
                "eval_time": f"{minute[1:]}m",
                "alertname": alert,
                "exp_alerts": [] if value is None else [self._fired(alert, value)],
            }
            for minute, value in firing.items()
        ]
        story = {
            "interval": "1m",
            "input_series": series(history, minutes, handover),
            "alert_rule_test": tests,
        }
        file = self._directory / "tests.yaml"
        whole = {"rule_files": [str(self.file)], "evaluation_interval": "1m", "tests": [story]}
        file.write_text(yaml.safe_dump(whole))
        self.promtool("test", "rules", str(file))

    def _fired(self, alert: str, value: str) -> Document:
        rule = self._alerts[alert]
        labels = {"namespace": RED[0], "job": RED[1]} if "$labels" in str(rule) else {}

        def said(text: str) -> str:
            for name, label in labels.items():
                text = text.replace(f"{{{{ $labels.{name} }}}}", label)
            for form in ("humanize", "humanizeDuration", "humanizePercentage"):
                text = text.replace(f"{{{{ $value | {form} }}}}", value)
            assert "{{" not in text
            return text

        return {
            "exp_labels": {**rule["labels"], **labels},
            "exp_annotations": {key: said(text) for key, text in rule["annotations"].items()},
        }


def series(history: Callable[[int], OperatorState], minutes: int, handover: int) -> list[Document]:
    """One scrape a minute. Missing series are marked stale, as in Prometheus."""
    pods = ["holdfast-a" if minute < handover else "holdfast-b" for minute in range(minutes)]
    columns = [scrape(history(minute), pod) for minute, pod in enumerate(pods)]
    names = dict.fromkeys(name for column in columns for name in column)
    found = []
    for name in names:
        values = [column.get(name) for column in columns]
        text = []
        for before, now in itertools.pairwise([None, *values]):
            gap = "_" if before is None else "stale"
            text.append(gap if now is None else f"{now:g}")
        found.append({"series": name, "values": " ".join(text)})
    return found


def scrape(facts: OperatorState, pod: str) -> dict[str, float]:
    """`pod`: a label that Prometheus adds."""
    found = {}
    for family in text_string_to_metric_families(exposition(facts).decode()):
        for one in family.samples:
            given = sorted({**one.labels, "pod": pod}.items())
            labels = ",".join(f'{name}="{value}"' for name, value in given)
            found[f"{one.name}{{{labels}}}"] = one.value
    return found


def facts(*views: JobView, **states: JobPhase) -> OperatorState:
    """Jobs in namespace red; `states`: those without a controller."""
    return OperatorState(
        leading=True,
        requests={},
        views={("red", view.name): view for view in views},
        states={("red", name): state for name, state in states.items()},
    )


def running(minute: int, **fields: Any) -> JobView:
    """View of a running job whose first step was half a minute after its submission."""
    fields = {"state": "running", "first_step_s": 30.0, "goodput": 0.9, **fields}
    return JobView(name=RED[1], submitted_ns=MINUTE, now_ns=(minute + 1) * MINUTE, **fields)


@pytest.fixture
def rules(documents: dict[str, Document], tmp_path: Path) -> Rules:
    if refusal := promtool.refusal():
        pytest.skip(refusal)
    return Rules(documents["PrometheusRule"], tmp_path)


def test_promtool_accepts_the_rules(rules: Rules) -> None:
    text = rules.promtool("check", "rules", str(rules.file))
    assert f"SUCCESS: {len(rules._alerts)} rules found" in text


@pytest.mark.parametrize("page", [DASHBOARD, ray_dashboard.TARGET], ids=["chart", "ray"])
def test_promtool_parses_every_query_of_the_dashboards(rules: Rules, page: Path) -> None:
    """The queries are recording rules; Grafana's variables only occur in strings."""
    panels = json.loads(page.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(asked) > 20
    group = {
        "name": "dashboard",
        "rules": [{"record": f"q{n}", "expr": e} for n, e in enumerate(asked)],
    }
    rules.file.write_text(yaml.safe_dump({"groups": [group]}))
    text = rules.promtool("check", "rules", str(rules.file))
    assert f"SUCCESS: {len(asked)} rules found" in text


def test_the_first_hang_of_a_job_fires_and_resolves_after_a_quarter_of_an_hour(
    rules: Rules,
) -> None:
    def history(minute: int) -> OperatorState:
        hang = IncidentCount(failure_class="hang", scope="worker", count=1)
        return facts(running(minute, incident_counts=[hang] if minute >= 10 else []))

    rules.expect(history, 40, "HoldfastHang", m9=None, m11="", m20="", m30=None)


def test_a_hang_before_a_new_leader_does_not_fire_again(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        hang = IncidentCount(failure_class="hang", scope="node", count=3)
        return facts(running(minute, incident_counts=[hang]))

    rules.expect(history, 20, "HoldfastHang", m1=None, m10=None)


def test_a_failed_job_fires_while_its_object_exists(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        if minute < 5:
            return facts(running(minute), other="succeeded", stopped="cancelled")
        states: dict[str, JobPhase] = {RED[1]: "failed"} if minute < 60 else {}
        return facts(**states, other="succeeded", stopped="cancelled")

    rules.expect(history, 70, "HoldfastJobFailed", m4=None, m5="", m59="", m61=None)


def test_a_job_without_a_checkpoint_alerts_an_hour_after_its_first_step(
    rules: Rules,
) -> None:
    def history(minute: int) -> OperatorState:
        waiting = JobView(name="waits", submitted_ns=0, now_ns=minute * MINUTE)
        late = CheckpointView(step=9, generation=1, committed_ns=81 * MINUTE)
        written = [late] if minute >= 81 else []
        return facts(running(minute, checkpoints=written), waiting)

    age = {"m67": "1h 6m 30s", "m80": "1h 19m 30s"}
    rules.expect(history, 90, "HoldfastCheckpointOld", m62=None, **age, m82=None)


def test_a_job_that_stops_writing_checkpoints_alerts(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        last = CheckpointView(step=9, generation=1, committed_ns=(min(minute, 30) + 1) * MINUTE)
        failures = 1 if minute >= 31 else 0
        return facts(running(minute, checkpoints=[last], storage_failures=failures))

    rules.expect(history, 110, "HoldfastCheckpointOld", m80=None, m97="1h 7m 0s")
    rules.expect(history, 60, "HoldfastCheckpointFails", m30=None, m32="", m50=None)


def test_a_cluster_without_a_leader_alerts(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        return facts()._replace(leading=minute < 5 or minute == 10)

    rules.expect(history, 20, "HoldfastNoLeader", m4=None, m6=None, m8="", m10=None, m14="")


def test_more_than_five_restarts_in_half_an_hour_are_a_storm(rules: Rules) -> None:
    """Restarts count over all classes; one each hour is not a storm."""

    def history(minute: int) -> OperatorState:
        hourly, storm = minute // 60, max(0, min(minute - 200, 8))
        return facts(running(minute, restarts={"infrastructure": hourly, "hang": storm}))

    fires = {"m206": "7", "m230": "8"}
    rules.expect(history, 260, "HoldfastRestartStorm", m199=None, m203=None, **fires, m240=None)


def test_a_running_job_with_little_progress_alerts(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        if minute >= 60:
            return facts(**{RED[1]: "suspended"})
        return facts(running(minute, goodput=0.5 if minute >= 10 else 0.9))

    fires = {"m40": "50%", "m59": "50%"}
    rules.expect(history, 70, "HoldfastGoodputLow", m9=None, m39=None, **fires, m61=None)


def test_a_job_that_waits_for_nodes_alerts_after_a_quarter_of_an_hour(rules: Rules) -> None:
    def history(minute: int) -> OperatorState:
        return facts(**{RED[1]: "pending"}) if minute < 30 else facts(running(minute))

    rules.expect(history, 40, "HoldfastWaitsForNodes", m14=None, m15="", m29="", m31=None)


@pytest.mark.parametrize(
    ("alert", "fields", "value"),
    [
        ("HoldfastGoodputLow", {"goodput": 0.5}, "50%"),
        ("HoldfastCheckpointOld", {}, "1h 34m 30s"),
        ("HoldfastWaitsForNodes", {"state": "pending"}, ""),
    ],
)
def test_an_alert_continues_when_another_operator_leads(
    rules: Rules, alert: str, fields: dict[str, Any], value: str
) -> None:
    def history(minute: int) -> OperatorState:
        return facts(running(minute, **fields))

    rules.expect(history, 110, alert, handover=93, m95=value)
