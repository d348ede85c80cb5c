"""The journal of a job as numbered chunks in a store: files, a ConfigMap, or Ray's keys."""
