"""Parallelism, data, models and the recipes."""
