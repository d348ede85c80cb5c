"""The commands of the CLI. They import heavy modules inside functions: `--help` must be fast."""
