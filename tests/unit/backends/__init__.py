"""Tests of orchestrator/backends."""
