"""The Kubernetes backend: nodes are pods. Requests to the API server go through `kube`."""
