"""Tests of workers/training/parallel."""
