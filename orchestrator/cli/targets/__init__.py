"""Places of jobs: a home on this machine, a cluster. The commands ask these, and nothing else."""
