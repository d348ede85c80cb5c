"""Nodes as actors of a Ray cluster, one placement-group bundle each; the only room that imports
ray."""
