"""lightning_ddp.py with `trainer.fit(model)`: Lightning begins at step 0."""

from __future__ import annotations

import lightning_ddp

if __name__ == "__main__":
    lightning_ddp.main(ckpt_path=None)
