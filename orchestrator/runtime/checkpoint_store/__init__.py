"""Manifests and deletion of checkpoints on the storage tier."""
