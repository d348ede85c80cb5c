"""hf_kept.py with FSDP2 of accelerate."""

from __future__ import annotations

from hf_fsdp2_memory import FSDP2, take_cpus_for_gpus
from hf_kept import main_kept

if __name__ == "__main__":
    main_kept(begin=take_cpus_for_gpus, **FSDP2)
