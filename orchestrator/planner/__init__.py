"""Spec and nodes -> mesh, memory and network traffic, with the reasons. Pure: used on every resize.

choose.py chooses the mesh; memory.py and communication.py estimate its cost; plan.py combines them.
"""

from .choose import choose_mesh, num_nodes_used
from .plan import Plan, make_plan

__all__ = ["Plan", "choose_mesh", "make_plan", "num_nodes_used"]
