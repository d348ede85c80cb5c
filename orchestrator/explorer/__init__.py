"""Figures that a person explores before a launch, and no launch needs: network traffic and time of
a step, search over strategies, advice. Pure. plan.py and model_plan.py combine them."""
