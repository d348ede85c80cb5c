"""Callbacks of frameworks that report to Holdfast. Each module imports its framework."""
