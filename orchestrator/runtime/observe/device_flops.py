"""Peak dense bfloat16 FLOP/s of devices, for MFU.

Owns: the table. Must not: guess; a device that is not in it has no MFU.

Source: the vendors' data sheets, without sparsity (those that only print the sparse figure: half).
"""

from __future__ import annotations

PEAKS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)
"""The first entry whose name is a part of the device's name counts. V100: float16, it has no
bfloat16."""


def peak_flops(device_name: str) -> float:
    """0 for a device that is not in the table."""
    words = device_name.replace("-", " ")
    return next((peak for name, peak in PEAKS if name in words), 0.0)
