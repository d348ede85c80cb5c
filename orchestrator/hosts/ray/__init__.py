"""A job's controller in a Ray actor, with its journal in Ray's GCS."""
