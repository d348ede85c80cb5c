"""Gang scheduling and queues: one Integration for each system, and the Admission of a job."""
