"""The systems under measurement, each behind the same four verbs: start, pids, break, stop."""
