"""One agent per node: forks workers, holds the memory tier, tells the controller."""
