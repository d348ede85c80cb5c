"""The operator: one process that hosts the controllers of all TrainingJobs of a cluster."""
