"""The build of the Kubernetes binaries that the rig runs: an explicit step, not part of a test."""
