"""Spec and nodes -> mesh, micro-batch and memory, with the reasons: what a launch and a resize
need. Pure."""
