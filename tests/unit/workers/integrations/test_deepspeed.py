"""Rejections of report_deepspeed; tests/frameworks/test_deepspeed.py has real engines."""

from __future__ import annotations

import pytest
import torch

from holdfast.integrations import report_deepspeed
from holdfast.orchestrator.errors import UserError


def test_a_model_that_is_no_engine_is_refused() -> None:
    with pytest.raises(UserError, match=r"got Linear, which has no global_steps; expected an eng"):
        report_deepspeed(torch.nn.Linear(2, 2))
