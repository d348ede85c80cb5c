"""titan_llama3.py with one argument more: steps and saves are reported."""

from __future__ import annotations

from titan_llama3 import main

if __name__ == "__main__":
    main("holdfast.torchtitan.report")
