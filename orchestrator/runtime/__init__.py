"""The loop of one job: driver, executor, agent server, control API, read model, metrics."""
