"""Optimizers of the recipe: AdamW alone, or beside one for the matrices of the blocks."""

from .choose import Optimizers, make_optimizer

__all__ = ["Optimizers", "make_optimizer"]
