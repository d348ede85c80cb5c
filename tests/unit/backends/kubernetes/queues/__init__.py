"""Tests of orchestrator/backends/kubernetes/queues."""
