"""Roofline arithmetic: what a forward must compute and move, and how fast an accelerator can do it at best.

Pure Python: reads configurations, never weights. Reading order: `work` (FLOPs, bytes, intensity of one
operation), `architecture` (a model's shape, parameters and cache), `forward` (a whole forward, a decode
step), `accelerator`.
"""

from specdec.roofline.accelerator import ACCELERATORS, DTYPE_BYTES, Accelerator, accelerator
from specdec.roofline.architecture import Architecture
from specdec.roofline.forward import DecodeStep, decode_step, forward, free_width
from specdec.roofline.variants import variants
from specdec.roofline.work import Work, attention, matmul, mlp

__all__ = [
    "ACCELERATORS",
    "DTYPE_BYTES",
    "Accelerator",
    "Architecture",
    "DecodeStep",
    "Work",
    "accelerator",
    "attention",
    "decode_step",
    "forward",
    "free_width",
    "matmul",
    "mlp",
    "variants",
]
