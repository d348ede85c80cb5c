"""Nodes as processes of this machine, forked by one node launcher per job."""

from .backend import LocalBackend, LocalPaths, node_limit

__all__ = ["LocalBackend", "LocalPaths", "node_limit"]
