"""A lock on what a run writes, so that a second one that would write the same is refused, and not mixed with it."""

import os
import stat

try:
    import fcntl
except ImportError:
    # Elsewhere than on Linux and macOS.
    fcntl = None

# Of the locks that this process holds.
_descriptors: set[int] = set()


class WriteLock:
    """Held until it is released, or the process ends, however it ends; it leaves nothing behind in the file or the folder.

    Where the file system or the platform has no such locks, and for pipes and devices, nothing is locked.
    """

    def __init__(self, path: str | os.PathLike, name: str):
        """Takes the lock.

        Args:
            path: A file or a folder that is there.
            name: Of the option that says where to write.

        Raises:
            ValueError: If another run holds it, in this process or elsewhere.
        """
        self._descriptor = None
        mode = os.stat(path).st_mode
        if fcntl is None or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return
        try:
            # Some network file systems lock only what is open for writing.
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
        """Lets others write; once more, it does nothing."""
        # After a fork the child has none.
        if self._descriptor in _descriptors:
            _descriptors.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> "WriteLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _leave_to_parent() -> None:
    """A process that was forked would hold the locks for as long as it lives, and it may live longer."""
    while _descriptors:
        os.close(_descriptors.pop())


if fcntl is not None:
    os.register_at_fork(after_in_child=_leave_to_parent)
