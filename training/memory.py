"""Memory: how the C library hands out what a training step needs again and again."""

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


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
    taken = [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1), mallopt(_M_TOP_PAD, 64 * 2**20)]
    logger.debug("mallopt returned %s", taken)
    return all(taken)
