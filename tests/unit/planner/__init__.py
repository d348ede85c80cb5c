"""Tests of orchestrator/planner."""
