"""Access to a Kubernetes API server: client, watches, credentials, leases, Events."""
