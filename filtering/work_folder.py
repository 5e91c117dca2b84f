"""Files of a run that may be killed: they grow in a folder beside the output, and get their names at the end."""

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaphrase.storage.folders import WriteLock, file_in_one_step, read_fields, write_json

_STATE = "state.json"


class WorkFolder(contextlib.AbstractContextManager):
    """Folder `OUTPUT.partial` with the files of an unfinished run and a state that says how far they go.

    A run appends to the files and then saves the state. A resumed run first cuts off what was appended after the state.

    Attributes:
        outputs: Final path of each output by name.
        state: The last state that was saved; empty at the beginning.
    """

    def __init__(self, outputs: Mapping[str, Path], key: Mapping[str, Any], *, resume: bool):
        """Make the folder, or open that of a stopped run.

        Args:
            outputs: Final path of each output by name.
            key: Settings and input of the run, as values of JSON. A stopped run must have the same.
            resume: True to continue a stopped run, False to start again.

        Raises:
            ValueError: If the stopped run had another key, another run is writing, or no run has written the folder.
        """
        self.outputs, self._key = dict(outputs), json.loads(json.dumps(key))
        self.path = partial_path(next(iter(self.outputs.values())))
        self._refuse_foreign_folder()
        if not resume and self.path.exists():
            WriteLock(self.path, "output").release()
            self._remove()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = WriteLock(self.path, "output")
        saved = read_fields(self.path / _STATE) or {}
        if saved and saved["key"] != self._key:
            self._lock.release()
            name = next((name for name, value in self._key.items() if saved["key"].get(name) != value), "resume")
            raise ValueError(
                f"`{name}` must be {saved['key'].get(name)!r} as in the stopped run in {self.path}, got {self._key.get(name)!r}. "
                "Repeat the command of that run, or pass --overwrite to start again."
            )
        self.state: dict[str, Any] = saved.get("state", {})
        self._sizes: dict[str, int] = saved.get("sizes", {})
        if not saved:
            with contextlib.ExitStack() as failed:
                failed.callback(self._lock.release)
                # The mark of a run's folder.
                self.save({})
                failed.pop_all()
        if not self.state.get("is_finished"):
            self._cut_files()

    def _cut_files(self) -> None:
        """Cut off what was appended after the state."""
        paths = {path.name: path for path in self.path.iterdir() if path.name != _STATE}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        for name, size in self._sizes.items():
            if sizes.get(name, 0) < size:
                self._lock.release()
                # The machine stopped before its disk had everything.
                raise ValueError(
                    f"{self.path / name} must have at least {size} bytes to go on, got {sizes.get(name, 0)}. Pass --overwrite "
                    "to start again."
                )
        for name, path in paths.items():
            os.truncate(path, self._sizes.get(name, 0))

    def _remove(self) -> None:
        """Remove the folder, and last its mark, so that a killed removal leaves the folder of a run."""
        for path in self.path.iterdir():
            if path.name != _STATE:
                path.unlink()
        shutil.rmtree(self.path)

    def _refuse_foreign_folder(self) -> None:
        """Refuse a folder that no run has written: a run empties or removes the files of its folder."""
        files = self.path.iterdir() if self.path.exists() else ()
        if not (self.path / _STATE).is_file() and any(not path.name.startswith(".") for path in files):
            raise ValueError(
                f"`output` must leave the name {self.path.name} to the run, got a folder of that name that no run has written. "
                "Choose another output."
            )

    def __exit__(self, *exception: object) -> None:
        if isinstance(exception[1], Exception) and not self.state:
            # A run that was refused, for example because a package is missing, has nothing to resume.
            self._remove()
        self._lock.release()

    def append(self, name: str, content: bytes) -> None:
        """Append to a file: an output, or a file of the run itself. Output whose path ends in .gz is compressed."""
        if name in self.outputs and self.outputs[name].name.endswith(".gz") and content:
            # A gzip file may have any number of members. Without a time, equal content has equal bytes.
            content = gzip.compress(content, mtime=0)
        with open(self.path / name, "ab") as file:
            file.write(content)
            self._sizes[name] = file.tell()

    def read(self, name: str) -> bytes:
        """Return the content of a file of the run itself; nothing if there is none."""
        path = self.path / name
        return path.read_bytes() if path.exists() else b""

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the state, which belongs to all that was appended so far."""
        with file_in_one_step(self.path / _STATE) as temporary:
            write_json(temporary, {"key": self._key, "sizes": self._sizes, "state": state})
        self.state = dict(state)

    def finish(self) -> None:
        """Give the outputs their names and remove the folder. The saved state must have `is_finished`."""
        for name, path in self.outputs.items():
            # A run that was killed here has moved some of them.
            if (self.path / name).exists():
                if path.name.endswith(".gz") and not (self.path / name).stat().st_size:
                    (self.path / name).write_bytes(gzip.compress(b"", mtime=0))
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.path / name, path)
        self._remove()


def partial_path(output: Path) -> Path:
    """Return the folder of an unfinished run."""
    return output.with_name(output.name + ".partial")
