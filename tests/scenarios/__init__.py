"""Bugs that the simulation found, told again as transcripts."""
