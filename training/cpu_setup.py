"""Memory: how the C library hands out what a training step needs again and again, and how many kernels are kept for it.

Precision: whether half of it pays on the processor at hand.
"""

import ctypes
import logging
import os
import platform
import time

import torch

logger = logging.getLogger(__name__)

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
# Enough for the shapes that the layers of a step repeat. To make those of one anew takes 20 to 40 ms of 4 seconds at base
# dimensions, whatever is kept of the steps before.
_KERNELS = 64
# The cache of oneDNN (its documentation, "Primitive Cache"), and that of torch before it.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next step instead of giving it back to the system.

    By default every large temporary is mapped afresh and touched page by page: on a CPU, a training step then spends much of its
    time in the kernel. The process holds on to its peak afterwards. Settings in the environment (`MALLOC_...`) stay in force
    elsewhere; without glibc nothing happens.

    Returns:
        Whether the settings were taken.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Any threshold that `mallopt` takes, an `int`, is less than what a large model frees at a time; -1 is none.
    taken = [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1), mallopt(_M_TOP_PAD, 64 * 2**20)]
    logger.debug("mallopt returned %s", taken)
    return all(taken)


def keep_few_kernels() -> bool:
    """Tells oneDNN to keep the kernels of a step, instead of those of the last 1,024 shapes.

    On a CPU, oneDNN generates code for each shape of a matrix product in bfloat16, half a megabyte a piece, and batches by length
    have new shapes at every step: the kernels grow to a gigabyte that is hardly read again, and lie between the temporaries, so
    that the heap grows as well. Both caches are made with their first product; settings in the environment stay in force.

    Returns:
        Whether the settings were taken: not where the environment has others.
    """
    taken = [os.environ.setdefault(name, str(_KERNELS)) == str(_KERNELS) for name in _KERNEL_CACHES]
    return all(taken)


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
