"""Who places a job's nodes together and admits them: one small file per system, pure, and queue.py,
which a job's backend speaks to."""
