"""Ready-made training loops, chosen in the spec by name."""
