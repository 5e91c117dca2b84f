"""Free main memory."""

import contextlib
from pathlib import Path

import psutil


def free_main_memory() -> int:
    """Return the free bytes of main memory. A container may have less than the machine."""
    free = psutil.virtual_memory().available
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()))
    return free
