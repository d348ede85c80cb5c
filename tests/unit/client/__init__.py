"""Tests of orchestrator/client."""
