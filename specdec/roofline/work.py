"""FLOPs, bytes and arithmetic intensity of single operations.

Letters: B sequences, T new tokens each, S tokens attended to, D hidden, F feed-forward, N·H query width,
K·H key width.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.roofline.accelerator import Accelerator


@dataclass(frozen=True)
class Work:
    """What must be computed and moved.

    Arguments:
        flops: floating-point operations, a multiply-add being two.
        bytes: bytes moved between memory and processor, each operand and result once.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.bytes)

    __rmul__ = __mul__

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, accelerator: Accelerator, dtype: str = "bfloat16") -> float:
        """The least time it can take: as long as the slower of computing and moving."""
        return max(self.flops / accelerator.peak(dtype), self.bytes / accelerator.bandwidth)

    def bound(self, accelerator: Accelerator, dtype: str = "bfloat16") -> str:
        """`compute` or `memory`, whichever limits."""
        return "compute" if self.intensity >= accelerator.ridge(dtype) else "memory"


def matmul(
    rows: float, inner: float, columns: float, size: float = 2.0, weight_size: float | None = None
) -> Work:
    """X `[rows, inner]` · W `[inner, columns]`; intensity → rows while rows ≪ inner, columns.

    Arguments:
        size: bytes per number of X and of the result. weight_size: of W, the same by default.
    """
    weight_size = size if weight_size is None else weight_size
    moved = size * rows * (inner + columns) + weight_size * inner * columns
    return Work(2.0 * rows * inner * columns, moved)


def mlp(rows: float, hidden: float, ffn: float, size: float = 2.0, weight_size: float | None = None) -> Work:
    """The gated feed-forward layer, fused: up and gate `[D, F]`, down `[F, D]`, on rows = B·T tokens."""
    weight_size = size if weight_size is None else weight_size
    moved = size * rows * (2 * hidden + 2 * ffn) + 3 * weight_size * hidden * ffn
    return Work(6.0 * rows * hidden * ffn, moved)


def attention(
    batch: float,
    context: float,
    tokens: float,
    width: float,
    kv_width: float | None = None,
    size: float = 2.0,
    kv_size: float | None = None,
) -> Work:
    """Flash attention: scores never leave the processor; intensity S·T/(S+T) with as many key as query heads.

    The whole S×T rectangle is counted, as usual; a causal kernel may skip up to half of it in a prefill.

    Arguments:
        width: N·H, the width of queries and results. kv_width: K·H of keys, and of values; equal by default.
        size: bytes per number of queries and results. kv_size: of cached keys and values, the same by
            default.
    """
    kv_width = width if kv_width is None else kv_width
    kv_size = size if kv_size is None else kv_size
    moved = 2 * kv_size * batch * context * kv_width + 2 * size * batch * tokens * width
    return Work(4.0 * batch * context * tokens * width, moved)
