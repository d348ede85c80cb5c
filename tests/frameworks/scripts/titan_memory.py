"""titan_llama3.py with one argument more: the trainer's state is in the memory of the nodes."""

from __future__ import annotations

from titan_llama3 import main

if __name__ == "__main__":
    main("holdfast.torchtitan.in_memory")
