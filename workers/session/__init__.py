"""The API of a training script: init, restore, step, save, phase, tick, finish.

    from holdfast import session

    s = session.init()
    model, optimizer = build(s)
    for step in range(s.restore(model, optimizer), total_steps):
        loss = train_one(model, optimizer, step)
        s.step(step, loss=loss)
    s.finish()

Under Holdfast the job recovers in about a second and loses no finished step. Under torchrun, or as
a single process, the same script runs with the same process groups and mesh, without checkpoints.
"""

from holdfast.workers.checkpoint.rank_state import PerRank

from .core import Session, init, leave
from .reporting import phase, preemption, report

__all__ = ["PerRank", "Session", "init", "leave", "phase", "preemption", "report"]
