"""The holdfast command."""
