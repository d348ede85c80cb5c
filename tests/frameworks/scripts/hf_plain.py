"""hf_trainer.py with `trainer.train()`: transformers begins at step 0."""

from __future__ import annotations

import hf_trainer

if __name__ == "__main__":
    hf_trainer.main(plain=True)
