"""A model on the mesh of a job: one module per axis, and the settings of memory and precision."""

from .model import Deviation, Parallel

__all__ = ["Deviation", "Parallel"]
