"""Tests of orchestrator/explorer."""
