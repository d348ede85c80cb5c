"""The processes that host a job's controller, each with its kind of journal."""
