"""One agent per node: forks workers from a warm server, holds the memory tier, tells the controller."""
