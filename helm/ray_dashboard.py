"""Generates the dashboard for Ray's Grafana from the chart's dashboard, with the prefix of Ray's
exporter and without namespaces and the operator. A test in tests/tidy finds an outdated file.

    python -m helm.ray_dashboard
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.orchestrator.runtime.observe.prometheus import METRICS

from .render import CHART, MANIFESTS

SOURCE = CHART / "files" / "dashboard.json"
TARGET = MANIFESTS / "kuberay" / "holdfast_grafana_dashboard.json"
"""Named like Ray's own default_grafana_dashboard.json."""
WIDTH = 24


def text() -> str:
    dashboard = json.loads(SOURCE.read_text())
    dashboard |= {"title": "Holdfast on Ray", "uid": "holdfast-ray"}
    dashboard["tags"] = [*dashboard["tags"], "ray"]
    variables = dashboard["templating"]["list"]
    dashboard["templating"]["list"] = [one for one in variables if one["name"] != "namespace"]
    dashboard["panels"] = _placed([one for one in dashboard["panels"] if _is_of_a_job(one)])
    translated: dict[str, Any] = _translated(dashboard)
    return json.dumps(translated, indent=1) + "\n"


def _is_of_a_job(panel: dict[str, Any]) -> bool:
    names = tuple(spec.name for spec in METRICS)
    queries = [target["expr"] for target in panel.get("targets", ())]
    return all(any(name in query for name in names) for query in queries)


def _placed(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Closes the gaps of removed panels, from left to right and from top to bottom."""
    x = y = height = 0
    for panel in panels:
        at = panel["gridPos"]
        if x + at["w"] > WIDTH:
            x, y = 0, y + height
        at["x"], at["y"] = x, y
        x, height = x + at["w"], at["h"]
    return panels


def _translated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _translated(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_translated(one) for one in value]
    if not isinstance(value, str):
        return value
    for old, new in (
        ("{{namespace}}/", ""),
        ('namespace=~"$namespace",', ""),
        ('{namespace=~"$namespace"}', ""),
        ("(namespace, ", "("),
        ("holdfast_", "ray_holdfast_"),
    ):
        value = value.replace(old, new)
    return value


if __name__ == "__main__":
    TARGET.write_text(text())
    print(TARGET.relative_to(MANIFESTS.parent))
