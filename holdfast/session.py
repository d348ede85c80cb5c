"""What a training script calls: `from holdfast import session`; see docs/user/session.md."""

from holdfast.workers.session import Session, init, leave

__all__ = ["Session", "init", "leave"]
