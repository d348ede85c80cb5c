"""What is known about a job: view, incidents, goodput, Prometheus metrics."""
