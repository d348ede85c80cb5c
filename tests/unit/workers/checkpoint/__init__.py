"""Tests of workers/checkpoint."""
