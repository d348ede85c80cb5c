"""Worker processes of a node: forkserver, start-up, log lines, stacks."""
