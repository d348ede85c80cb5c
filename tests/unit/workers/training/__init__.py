"""Tests of workers/training."""
