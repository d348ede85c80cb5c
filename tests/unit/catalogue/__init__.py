"""Tests of orchestrator/catalogue."""
