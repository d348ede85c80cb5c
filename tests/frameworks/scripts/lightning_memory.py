"""lightning_ddp.py with one line more: the trainer's state is in the memory of the nodes."""

from __future__ import annotations

from lightning_ddp import main

from holdfast.integrations import InMemoryLightning

if __name__ == "__main__":
    main(InMemoryLightning())
