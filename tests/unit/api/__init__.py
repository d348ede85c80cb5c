"""Tests of orchestrator/api."""
