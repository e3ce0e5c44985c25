"""What accelerators can do at best, from their makers' data sheets (dense rates, no structured sparsity)."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.errors import OptionError

DTYPE_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}


@dataclass(frozen=True)
class Accelerator:
    """A processor as the roofline sees it.

    Arguments:
        name: what tables call it.
        bandwidth: bytes per second from its memory.
        flops: peak FLOPs per second by data type.
        memory: bytes of memory; `None` if unknown.
        measured: found by timing this machine, not read off a data sheet.
    """

    name: str
    bandwidth: float
    flops: dict[str, float] = field(default_factory=dict)
    memory: float | None = None
    measured: bool = False

    def peak(self, dtype: str = "bfloat16") -> float:
        """FLOPs per second in this data type; where it has no unit of its own, of the next wider type.

        Raises:
            KeyError: no rate is known for it or any wider type.
        """
        wider = {
            "int4": "int8",
            "fp8": "bfloat16",
            "int8": "bfloat16",
            "float16": "bfloat16",
            "bfloat16": "float32",
        }
        while dtype not in self.flops:
            dtype = wider[dtype]
        return self.flops[dtype]

    def ridge(self, dtype: str = "bfloat16") -> float:
        """FLOPs per byte from which on computing, not memory, limits."""
        return self.peak(dtype) / self.bandwidth


ACCELERATORS = {
    "h100": Accelerator(
        "H100 SXM", 3.35e12, {"float32": 67e12, "bfloat16": 989e12, "fp8": 1979e12, "int8": 1979e12}, 80e9
    ),
    "h200": Accelerator(
        "H200 SXM", 4.8e12, {"float32": 67e12, "bfloat16": 989e12, "fp8": 1979e12, "int8": 1979e12}, 141e9
    ),
    "a100": Accelerator(
        "A100 SXM 80GB", 2.039e12, {"float32": 19.5e12, "bfloat16": 312e12, "int8": 624e12}, 80e9
    ),
    "rtx4080": Accelerator("RTX 4080 (32 GB)", 716.8e9, {"float32": 48.7e12, "bfloat16": 97.5e12}, 32e9),
    "rtx3090": Accelerator(
        "RTX 3090", 936.2e9, {"float32": 35.6e12, "bfloat16": 71e12, "int8": 284e12}, 24e9
    ),
}


def accelerator(name: str, option: str = "task.accelerators") -> Accelerator:
    """The accelerator of that name.

    Raises:
        OptionError: there is none; `option` is what the user wrote it in.
    """
    if name not in ACCELERATORS:
        raise OptionError(option, name, f"no such accelerator; choices: {', '.join(ACCELERATORS)}.")
    return ACCELERATORS[name]
