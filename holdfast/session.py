"""What a training script calls: `from holdfast import session`; see docs/user/session.md."""

from holdfast.workers.session import PerRank, Session, init, leave, phase, preemption, report

__all__ = ["PerRank", "Session", "init", "leave", "phase", "preemption", "report"]
