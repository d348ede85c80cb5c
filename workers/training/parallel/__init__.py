"""A model on the mesh of a job: one module per axis, and the settings of memory and precision."""

from .model import Parallel

__all__ = ["Parallel"]
