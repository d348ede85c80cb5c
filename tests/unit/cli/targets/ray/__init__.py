"""Tests of orchestrator/cli/targets/ray."""
