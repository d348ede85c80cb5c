"""The agent's state machine. Pure: no clock, no I/O."""
