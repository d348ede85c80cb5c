"""Holdfast keeps large PyTorch training alive: the control plane. Never imports torch."""
