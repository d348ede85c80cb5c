"""The only room with a clock: driver, executor, journal, agent endpoint, metrics."""
