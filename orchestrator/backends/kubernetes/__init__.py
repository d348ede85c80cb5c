"""The Kubernetes backend: nodes are pods. The only room that imports `kubernetes`."""
