"""lightning_ddp.py with one line more: Holdfast's callback."""

from __future__ import annotations

from lightning_ddp import main

from holdfast.integrations import LightningCallback

if __name__ == "__main__":
    main(LightningCallback())
