"""What a training script calls: init, restore, step, save, phase, tick, finish.

    from holdfast import session

    s = session.init()
    model, optimizer = build(s)
    for step in range(s.restore(model, optimizer), total_steps):
        loss = train_one(model, optimizer, step)
        s.step(step, loss=loss)
    s.finish()

Under Holdfast this makes a job recover in a second, losing no finished step. Outside (torchrun, or
a single process) the same script runs with the same groups and mesh, and nothing is staged.
"""

from .core import Session, init, leave

__all__ = ["Session", "init", "leave"]
