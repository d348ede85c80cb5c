"""Tests of workers/session."""
