"""The pure state machine of a job: events in, actions out. No clock, no IO, no randomness."""
