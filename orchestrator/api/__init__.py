"""The Kubernetes API types of Holdfast."""
