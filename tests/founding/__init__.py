"""The founding documents, line by line: what Holdfast does with each, and the numbers."""
