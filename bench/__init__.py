"""Side-by-side measurements with other systems, both sides in one run."""
