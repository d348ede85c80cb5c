"""How exact the planner is: its figures beside those of the recipe's own training step."""
