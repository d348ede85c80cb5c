"""Bytes of checkpoints on a node: memory files, uploads, transfers between nodes."""
