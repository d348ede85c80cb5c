"""Shared by workers and control plane: spec, mesh, messages, environment, manifest, limits."""
