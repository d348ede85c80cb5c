"""Tests of orchestrator/hosts/ray."""
