"""Lock of an output: a second run that would write the same file or folder is refused."""

import contextlib
import os
import stat

try:
    import fcntl
except ImportError:
    # Only Linux and macOS have it.
    fcntl = None

# The locks of this process.
_descriptors: set[int] = set()


class WriteLock(contextlib.AbstractContextManager):
    """Lock of a file or folder, held until `release` or the end of the process. It leaves nothing on the disk.

    Nothing is locked for pipes and devices, or where the platform or file system has no such locks.
    """

    def __init__(self, path: str | os.PathLike, name: str):
        """Take the lock.

        Args:
            path: An existing file or folder.
            name: The option that names the output, for the error.

        Raises:
            ValueError: If another run holds the lock, in this process or another one.
        """
        self._descriptor = None
        mode = os.stat(path).st_mode
        if fcntl is None or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return
        try:
            # Some network file systems lock only files open for writing.
            self._descriptor = os.open(path, os.O_RDONLY if stat.S_ISDIR(mode) else os.O_WRONLY)
            _descriptors.add(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"`{name}` must be written by one run at a time, got {os.fspath(path)}, which another one is writing."
            ) from None
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the lock up; a second call has no effect."""
        # A forked child has closed its descriptors.
        if self._descriptor in _descriptors:
            _descriptors.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __exit__(self, *exception: object) -> None:
        self.release()


def _close_in_child() -> None:
    """Close the locks in a forked process, which may outlive its parent."""
    while _descriptors:
        os.close(_descriptors.pop())


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_in_child)
