"""Exactness of the planner: its figures beside those of the recipe's own training step."""
