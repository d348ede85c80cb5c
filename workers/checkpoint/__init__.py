"""Staging, writing, verifying and resharding of training state."""
