"""Tests of orchestrator/hosts."""
