"""Setup of a CPU for training: memory of the C library, kernels of oneDNN, and speed of bfloat16."""

import ctypes
import os
import platform
import timeit
from collections.abc import Iterator

import torch

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
# Enough for the shapes that the layers of a step repeat. New kernels take 20 to 40 ms of a step of 4 seconds at base dimensions.
_KERNELS = 64
# Caches of oneDNN (its documentation, "Primitive Cache") and of torch.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def prepare_cpu() -> None:
    """Set up a process that trains, before its first matrix product."""
    keep_freed_memory()
    keep_few_kernels()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the system.

    By default, each large temporary is mapped anew, and a training step on a CPU spends much of its time on page faults. The
    process keeps its peak memory afterwards.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # No threshold (-1), since a large model frees more at a time than the largest `int`.
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 * 2**20)):
            mallopt(parameter, value)


def keep_few_kernels() -> None:
    """Make oneDNN keep the kernels of one step instead of those of the last 1,024 shapes, if the environment sets no number.

    In bfloat16, oneDNN generates half a megabyte of code for each shape of a matrix product, and a token budget has new shapes
    at each step. The kernels would grow to a gigabyte and fragment the heap. Call it before the first matrix product.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KERNELS))


_SIZE, _ROUNDS = 512, 7
_SLOW, _FAST = 0.9, 1.5  # beyond measurement noise


def speed_of_bfloat16() -> float:
    """Measure the speed of matrix products in bfloat16 relative to float32 on this processor, within milliseconds.

    The ratio is 4 and more with AMX, about 2 with a full AVX-512 BF16 unit, and below 1 without such a unit.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        # The minimum, since the first round makes the kernel and other processes disturb.
        names = {"matrix": torch.ones(_SIZE, _SIZE, dtype=dtype)}
        seconds[dtype] = min(timeit.repeat("matrix @ matrix", globals=names, number=1, repeat=_ROUNDS))
    return seconds[torch.float32] / seconds[torch.bfloat16]


def has_fast_bfloat16() -> bool:
    """Return True if this machine trains faster in bfloat16."""
    if torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return speed_of_bfloat16() > _FAST


def slow_bfloat16_alerts() -> Iterator[str]:
    """Yield an alert if bfloat16 makes training on this processor slower."""
    speed = speed_of_bfloat16()
    if speed < _SLOW:
        yield (
            f"`bf16` slows this processor down: it multiplies matrices in bfloat16 at {speed:.2f} of its speed in float32. "
            "Train with --bf16 false here."
        )
