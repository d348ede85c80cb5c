"""Tests on clusters with nodes: kubelets, containers and training."""
