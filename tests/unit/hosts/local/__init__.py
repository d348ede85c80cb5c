"""Tests of orchestrator/hosts/local."""
