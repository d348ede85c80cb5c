"""Tests on a real Kubernetes: its API server, its scheduler, its kubelets, real pods."""
