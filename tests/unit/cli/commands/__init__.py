"""Tests of orchestrator/cli/commands."""
