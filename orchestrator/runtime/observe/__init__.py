"""Observation of a job: view, incidents, goodput, Prometheus metrics."""
