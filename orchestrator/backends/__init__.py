"""Sources of nodes. Backends obey, they never decide."""
