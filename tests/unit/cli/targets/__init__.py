"""Tests of orchestrator/cli/targets."""
