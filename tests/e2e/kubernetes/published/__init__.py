"""The published CRDs of the systems that Holdfast works with."""
