"""hf_trainer.py with one line more: Holdfast's callback."""

from __future__ import annotations

from hf_trainer import main

from holdfast.integrations import TransformersCallback

if __name__ == "__main__":
    main(TransformersCallback())
