"""Tests of workers with real process groups."""
