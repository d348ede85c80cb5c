"""Tests of orchestrator/protocol."""
