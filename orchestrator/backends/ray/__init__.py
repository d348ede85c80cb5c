"""Nodes as actors of a Ray cluster, one placement-group bundle each. Only this package and
hosts/ray import ray."""
