"""Nodes as processes of this machine, forked by one warm machine host per job."""

from .backend import LocalBackend, LocalPaths

__all__ = ["LocalBackend", "LocalPaths"]
