"""Precision: whether half of it pays on the processor at hand."""

import logging
import time

import torch

logger = logging.getLogger(__name__)

_SIZE, _ROUNDS = 512, 7
_SLOW = 0.9  # less than this is no accident


def speed_of_bfloat16() -> float:
    """How many times as fast as float32 this processor multiplies matrices in bfloat16, by a trial of milliseconds.

    Four times and more with AMX, twice with a full AVX-512 BF16 unit; below one where the unit is narrow or missing.
    """
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    matrices = {dtype: torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in seconds}
    for _ in range(_ROUNDS):
        for dtype, matrix in matrices.items():
            start = time.perf_counter()
            matrix @ matrix
            # The least of them: the first makes the kernel, and the machine may do something else besides.
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def warn_of_slow_bfloat16() -> None:
    """Says so where bfloat16 makes training on this processor slower rather than faster."""
    speed = speed_of_bfloat16()
    if speed < _SLOW:
        logger.warning(
            "`bf16` slows this processor down: it multiplies matrices in bfloat16 at %.2f of its speed in float32. "
            "Train with --bf16 false here.",
            speed,
        )
