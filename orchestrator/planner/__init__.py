"""Spec and nodes -> mesh, memory, network traffic and time of a step, with the reasons. Pure: used
on every resize.

workload.py is the input of every estimate: memory.py, traffic.py and step_time.py. choose.py
chooses the mesh of a job, search.py the layout of a model, and ranking.py puts layouts in order;
plan.py and model_plan.py combine them.
"""

from .choose import choose_mesh, num_nodes_used
from .plan import Plan, make_plan

__all__ = ["Plan", "choose_mesh", "make_plan", "num_nodes_used"]
