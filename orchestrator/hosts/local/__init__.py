"""A job's controller in the `holdfast run` process, with a journal on disk."""
