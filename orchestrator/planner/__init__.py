"""Spec and nodes -> mesh, memory, bytes on the wire, and why. Pure: the core asks on every resize.

choose.py picks the mesh; memory.py and communication.py say what it costs; plan.py has it all.
"""

from .choose import choose_mesh, num_nodes_used
from .plan import Plan, make_plan

__all__ = ["Plan", "choose_mesh", "make_plan", "num_nodes_used"]
