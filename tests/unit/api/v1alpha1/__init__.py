"""Tests of orchestrator/api/v1alpha1."""
