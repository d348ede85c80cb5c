"""hf_trainer.py with one line more: the trainer's state is in the memory of the nodes."""

from __future__ import annotations

from hf_trainer import main

from holdfast.integrations import in_memory

if __name__ == "__main__":
    main(prepare=in_memory)
