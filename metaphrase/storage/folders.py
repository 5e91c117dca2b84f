"""Files and folders that appear complete or not at all, and locks against a second writer."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from metaphrase.errors import MetaphraseError

logger = logging.getLogger(__name__)

_CARD_NAME = "README.md"
# It names the models of an ensemble.
ENSEMBLE_NAME = "ensemble.json"
# Target tokens that each source token permits.
VOCABULARY_MAP_NAME = "vmap.txt"
# Provenance of an encoder-decoder made of decoder-only models, and of an export.
ADAPTATION_NAME, EXPORT_NAME = "adaptation.json", "export.json"


@contextlib.contextmanager
def file_in_one_step(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` if the block succeeds and is removed if it fails.

    A pipe or device is yielded itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    # A link stays a link.
    path = path.resolve()
    temporary = _temporary_path(path, "partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_in_one_step(output: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `output` if the block succeeds and is removed if it fails.

    `check` raises an error if `output` must not be replaced. It is called before the block, which may take hours, and behind.
    The README.md of a replaced folder is kept: its owner may have edited it.
    """
    check()
    output = output.resolve()
    partial, replaced = (_temporary_path(output, kind) for kind in ("partial", "replaced"))
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_lock(output, "output"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        restore_replaced(output)
        try:
            yield partial
            set_modes_of_weights(partial)
            check()
            if (output / _CARD_NAME).is_file() and not (partial / _CARD_NAME).exists():
                shutil.copy2(output / _CARD_NAME, partial)
            if output.exists():
                output.rename(replaced)
            # Fails if a folder with content has just appeared.
            partial.rename(output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            restore_replaced(output)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(output: Path) -> None:
    """Give a folder that a killed run was about to replace its name back."""
    replaced = _temporary_path(output.resolve(), "replaced")
    if replaced.exists() and not output.exists():
        replaced.rename(output)


def set_modes_of_weights(folder: Path) -> None:
    """Give the weights of a folder the mode of its other files. safetensors writes files that their owner alone may read."""
    for path in folder.glob("*.safetensors"):
        path.chmod(folder.stat().st_mode & 0o666)


def _temporary_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def check_output(output: Path, sources: Sequence[Path], overwrite: bool, mark: str, action: str) -> None:
    """Check that a folder may be written.

    Args:
        output: The folder to write, which may exist if `overwrite` is true.
        sources: The folders to read.
        mark: Name of the file that proves that this package wrote `output`. It lists the other files.
        action: Participle for the error message, such as averaged.
    """
    restore_replaced(output)
    resolved = output.resolve()
    for source in map(Path.resolve, sources):
        if resolved.is_relative_to(source) or source.is_relative_to(resolved):
            raise MetaphraseError(f"`output` must lie apart from what is {action}, got {output} and {source}.")
    if not output.exists():
        return
    if not overwrite:
        raise MetaphraseError(f"`output` must not exist, got {output}. Pass --overwrite to replace it.")
    written = (read_fields(output / mark) or {}).get("files") or ()
    # Other subcommands write a card and scores beside a model.
    unknown = _files_in(output) - {_CARD_NAME, "metrics.json", mark, *written}
    if unknown or not (output / mark).is_file():
        raise MetaphraseError(
            f"`output` must hold only the files that {mark} lists to be overwritten, got {output} with "
            f"{', '.join(sorted(unknown)[:3])}. Move the other files, or choose another folder."
        )


def check_writable(folder: Path, name: str) -> None:
    """Refuse a folder, which need not exist, that cannot be written to. `name` is the option that names the folder."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        kind = "read-only" if existing.is_dir() else "a file"
        raise MetaphraseError(
            f"`{name}` must be in a folder that you may write to, got {folder}: {existing} is {kind}."
        )


def _files_in(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def refuse_outer_links(folder: Path, paths: Iterable[Path], field: str) -> None:
    """Refuse links to files outside of a folder, such as a private key, before their content is copied or uploaded."""
    root = folder.resolve()
    # In the cache of the Hub, files are links to the blobs of their repository.
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in paths:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise MetaphraseError(
                f"`{field}` must hold no link to a file outside of it, got {path} -> {path.resolve()}. "
                "Replace the link by a copy."
            )


def read_fields(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any] | None:
    """Return the fields of a file, or None if it is missing. Errors are as for `read_json`."""
    return read_json(path, parse) if path.exists() else None


def members_of(name_or_path: str | os.PathLike) -> list[Path]:
    """Return the folders of the models that a folder joins as an ensemble. A single model, or a name on the Hub, has none."""
    path = Path(name_or_path, ENSEMBLE_NAME)
    names = (read_fields(path) or {"models": []}).get("models")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise MetaphraseError(f"`models` in {str(path)!r} must be a list of folders, got {names!r}.")
    return [path.parent / name for name in names]


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Return the fields of a file. Raise a `MetaphraseError` if the file is damaged or does not hold fields."""
    try:
        content = parse(read_text(path))
    except (ValueError, RecursionError) as error:
        # A YAML error has several lines.
        text = " ".join(str(error).split())
        raise MetaphraseError(f"`{path.name}` must be readable, got an error in {str(path)!r}: {text}") from error
    if not isinstance(content, dict):
        raise MetaphraseError(f"`{path.name}` must hold fields with values, got {type(content).__name__} in {path}.")
    return content


def read_text(path: Path) -> str:
    """Return the text of a file. Raise a `MetaphraseError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MetaphraseError(f"`{path.name}` must be UTF-8, got an error in {str(path)!r}: {error}.") from error


def write_provenance(path: Path, source: str | os.PathLike | None = None, **fields: Any) -> None:
    """Write, as the last file of a folder, where the folder comes from and which files it has. See `check_output`.

    Of a source that is a folder, the name without its parents is written.
    """
    if source is not None:
        fields = {"source": Path(source).resolve().name if os.path.isdir(source) else os.fspath(source)} | fields
    write_json(path, fields | {"files": sorted(_files_in(path.parent))})


def json_text(content: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Return indented JSON with a final line feed."""
    return json.dumps(content, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    path.write_text(json_text(content, sort_keys=sort_keys), encoding="utf-8")


@contextlib.contextmanager
def write_lock(path: str | os.PathLike, name: str) -> Iterator[None]:
    """Lock a file or folder, which need not exist, against a second run. `name` is the option that names it.

    The lock is the file `.NAME.lock` beside the output, which is removed at the end. The next run takes over what a killed run
    has left. Pipes and devices have no lock, and a place that permits none has a warning.
    """
    path = Path(path).resolve()
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield
        return
    # Another thread may end the run.
    lock = FileLock(_temporary_path(path, "lock"), timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise MetaphraseError(
            f"`{name}` must be written by one run at a time, got {path}, which another one is writing."
        ) from None
    except OSError as error:
        logger.warning("%s is not locked against a second run: %s.", path, error)
    try:
        yield
    finally:
        if lock.is_locked:
            # Before another run can hold the lock of this file.
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
            lock.release()
