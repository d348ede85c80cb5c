"""Tests of orchestrator/hosts/kubernetes."""
