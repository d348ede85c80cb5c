"""Training scripts of other frameworks under Holdfast, in an environment of their own."""
