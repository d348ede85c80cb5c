"""Tests of orchestrator/cli."""
