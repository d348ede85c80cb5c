"""What the planner knows: devices, links and model architectures, as data with sources.

types.py has the types; load.py reads the files beside it and a user's own; hugging_face.py reads
the configuration of a model.
"""
