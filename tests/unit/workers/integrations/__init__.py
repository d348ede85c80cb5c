"""Tests of workers/integrations that need no framework."""
