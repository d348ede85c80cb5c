"""The GPU kit: every blind spot of a tree that was written without a GPU, as measurements."""
