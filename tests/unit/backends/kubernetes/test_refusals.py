"""Reason why the API server does not create a pod, as the reason in the job's conditions."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.backends.kubernetes.backend import Refusal
from holdfast.orchestrator.kube.errors import Forbidden


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ('pods "a" is forbidden: violates PodSecurity "restricted:latest": privileged',
         "PodSecurity"),
        ('pods "a" is forbidden: no PriorityClass with name gold was found',
         "PriorityClassMissing"),
        ('pods "a" is forbidden: error looking up service account t/s: serviceaccount "s" not '
         "found", "ServiceAccountMissing"),
        ('pods "a" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
         "LimitRange"),
        ('admission webhook "policy.example.com" denied the request: no', "AdmissionDenied"),
        ('pods "a" is forbidden: exceeded quota: small, requested: pods=1', "NoRoom"),
    ],
)  # fmt: skip
def test_only_a_lack_of_capacity_is_called_one(message: str, code: str) -> None:
    refusal = Refusal.of(2, Forbidden("forbidden", status=403, message=message), 0.0)
    assert refusal.code == code and message in refusal.why
