"""A script of `examples/frameworks` with the step log: `logged.py EXAMPLE ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import steplog
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def finished(optimizer: Optimizer, *_: Any) -> None:
    """The step is Adam's, which counts on from a checkpoint."""
    steplog.finished(int(next(iter(optimizer.state.values()))["step"]))


if __name__ == "__main__":
    register_optimizer_step_post_hook(finished)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
