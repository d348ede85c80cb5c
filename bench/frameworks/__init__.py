"""Unmodified scripts of other frameworks under faults: Holdfast beside torchrun."""
