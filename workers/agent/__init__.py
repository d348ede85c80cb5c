"""One agent per node: forks workers, holds the memory tier, reports to the controller."""
