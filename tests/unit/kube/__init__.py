"""Tests of orchestrator/kube."""
