"""Functions for training scripts: `from holdfast import session`; see docs/user/session.md."""

from holdfast.orchestrator.protocol import training_packages

try:
    from holdfast.workers.session import PerRank, Session, init, leave, phase, preemption, report
except ModuleNotFoundError as error:
    if error.name in ("torch", *training_packages.PARTS):
        raise ImportError(f"holdfast.session: {training_packages.problem('torch')}") from None
    raise

__all__ = ["PerRank", "Session", "init", "leave", "phase", "preemption", "report"]
