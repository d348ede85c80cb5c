"""What workers and control plane share: spec, mesh, messages, environment, manifest, limits."""
