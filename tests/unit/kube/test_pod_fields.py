"""Misspelt fields of a pod template."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.hosts.kubernetes.spec import template_problems
from holdfast.orchestrator.kube.pod_fields import misspelt_fields
from tests.unit.api.wrong_jobs import job, script


@pytest.mark.parametrize(
    ("pod", "path", "close"),
    [
        ({"spec": {"tolerationz": []}}, "spec.tolerationz", "tolerations"),
        ({"spec": {"tolerations": [{"efect": "NoSchedule"}]}}, "spec.tolerations[0].efect",
         "effect"),
        ({"spec": {"containers": [{"name": "worker"}, {"name": "b", "volumeMount": []}]}},
         "spec.containers[1].volumeMount", "volumeMounts"),
        ({"metadata": {"label": {"a": "b"}}}, "metadata.label", "labels"),
        ({"spec": {"affinity": {"nodeAffinities": {}}}}, "spec.affinity.nodeAffinities",
         "nodeAffinity"),
        ({"spec": {"containers": [{"name": "w", "$patch": "delete"}]}}, "spec.containers[0].$patch",
         "null, which removes a field"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_found_with_its_path(
    pod: dict[str, Any], path: str, close: str
) -> None:
    assert misspelt_fields(pod) == [(path, close)]


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"metadata": {"labels": {"tolerationz": "x"}, "annotations": None}},
        {"spec": {"nodeSelector": {"node": "a"}, "containers": [{"name": "w"}],
                  "resources": {"limits": {"nvidia.com/gpu": 1}}}},
        {"spec": {"fieldOfANewerCluster": 1}},
        {"spec": {"tolerations": "no list", "containers": [1]}},
    ],
)  # fmt: skip
def test_fields_of_the_api_and_of_newer_clusters_are_left_to_the_api_server(
    pod: dict[str, Any],
) -> None:
    assert misspelt_fields(pod) == []


def test_the_message_says_which_field_was_meant() -> None:
    template = {"podTemplate": {"spec": {"tolerationz": [{"key": "gpu"}]}}}
    (problem,) = template_problems(job_from_mapping(job(script(kubernetes=template), "llm")))
    assert str(problem).startswith("spec.kubernetes.podTemplate.spec.tolerationz: got an unknown")
    assert "did you mean tolerations?" in str(problem)


@pytest.mark.parametrize(
    ("containers", "got"),
    [
        ([{"name": "main", "image": "i"}], "main"),
        ([{"name": "logs"}, {"name": "main", "image": "i"}], "main"),
        ([{"name": "worker"}, {"name": "logs", "image": "i"}], ""),
        ([{"name": "worker", "image": "i"}], ""),
        ([{"name": "logs"}], ""),
    ],
)
def test_a_container_with_an_image_does_not_stand_for_the_workers(
    containers: list[dict[str, str]], got: str
) -> None:
    template = {"podTemplate": {"spec": {"containers": containers}}}
    found = template_problems(job_from_mapping(job(script(kubernetes=template), "llm")))
    assert [str(one) for one in found] == [
        f"spec.kubernetes.podTemplate.spec.containers: got {got} and no worker; expected worker, "
        "the training container; rename it to worker, or add `- name: worker` beside a sidecar"
    ][: bool(got)]
