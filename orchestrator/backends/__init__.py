"""Where nodes come from. Backends obey, they never decide."""
