"""The explorer's data with their sources: devices, links, model architectures and measurements.

types.py has the types; load.py reads the files beside it and a user's own; hugging_face.py reads
the configuration of a model; calibration.py and measurements.py have what this user measured.
"""
