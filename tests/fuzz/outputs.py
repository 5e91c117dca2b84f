"""Cases with an output beside or on the files of a user: those that are read, a model, notes, or an earlier result."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from cases import Case, run, write_world
from recipes import BASE, train_words
from tiny_generator import save_generator, tiny_generator

# Folders that the verbs write, and their command lines without options.
FOLDERS = {
    "average": ["average", "model", "twin", "--output"],
    "convert": ["convert", "bart"],
    "export": ["export", "model", "--format", "ctranslate2"],
    "tokenize": ["tokenize", "--files", "in", "--output"],
}
# Files of a user in a folder that a verb has written.
NOTES = ("notes.txt", ".hidden", "sub/notes.txt", "checkpoint-3/model.safetensors", "target_tokenizer/notes.txt")
NOTES += ("README.md", "LICENSE", "link", "folder link", "")


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines, each in a copy of a user's folder, of which no other file may change than an output."""
    rng, whole = random.Random(seed), folder / "whole"
    write_world(whole)
    save_generator(tiny_generator(), whole / "draft")
    for name in ("model", "twin"):
        save_generator(tiny_generator(joint=False), whole / name)
    (whole / "notes").write_text("mine\n", encoding="utf-8")
    (whole / "terms.tsv").write_text("dog\tHund\n", encoding="utf-8")
    for verb, words in FOLDERS.items():
        end = run(_with_output(_absolute(words, whole), whole / verb), folder)
        assert end.status == 0, end.messages
    run(train_words(whole, BASE, whole / "run"), folder)
    for index in range(number):
        root = Path(shutil.copytree(whole, folder / str(index), symlinks=True))
        kind = rng.choices((_file, _folder, _run), (5, 4, 2))[0]
        yield kind(root, rng)


def _absolute(words: list[str], root: Path) -> list[str]:
    return [str(root / word) if (root / word).exists() and word not in FOLDERS else word for word in words]


def _with_output(words: list[str], output: Path | str) -> list[str]:
    return [*words, str(output)] if words[-1] == "--output" else [*words[:2], str(output), *words[2:]]


def _files(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_symlink() or path.is_file()]


def _file(root: Path, rng: random.Random) -> Case:
    """Return a case whose output may be a file that it reads, or a file of its model."""
    options, read = {
        "plain": ([], []),
        "glossary": (["--glossary", root / "terms.tsv"], [root / "terms.tsv"]),
        "draft": (["--assistant_model", root / "draft"], _files(root / "draft")),
        "ensemble": (["--ensemble", root / "twin"], _files(root / "twin")),
        "resume": (["--resume"], []),
    }[rng.choice(("plain", "glossary", "draft", "ensemble", "resume"))]
    words = ["generate", str(root / "model"), "--input", str(root / "in"), *map(str, options)]
    if rng.random() < 0.4:
        read = [root / "targets"]
        words = ["evaluate", str(root / "model"), "--source", str(root / "in"), "--target", str(root / "targets")]
    models = [path for name in ("model", "twin", "draft") for path in _files(root / name)]
    file = rng.choice(
        (root / "in", root / "targets", root / "terms.tsv", rng.choice(models), root / "notes", root / "new")
    )
    kind, path = rng.choice(("path", "link", "hard link", "dots")), file
    if kind == "dots":
        path = root / "model" / ".." / file.relative_to(root)
    elif kind == "link" or (kind == "hard link" and file.exists()):
        path = root / "link"
        (path.symlink_to if kind == "link" else path.hardlink_to)(file)
    words += ["--output", str(path)]
    can_replace = words[0] != "generate" or rng.random() < 0.7
    if words[0] == "generate" and can_replace and "--resume" not in words:
        words.append("--overwrite")
    everything = [file for file in _files(root) if file.exists()]
    guarded = _guarded(root, [root / "in", *read], path) if can_replace else everything
    return Case(f"{' '.join(words[2:])} -> {file.relative_to(root)}", words, guarded=guarded)


def _guarded(root: Path, read: list[Path], path: Path) -> list[Path]:
    """Return all files but the output. An output that is not read may be replaced: a user has named it."""
    read = [*read, *_files(root / "model")]
    outputs = [file for file in _files(root) if file.resolve() == path.resolve()]
    if path.exists():
        outputs += [file for file in _files(root) if file.samefile(path)]
    return [file for file in _files(root) if file in read or file not in outputs]


def _add_notes(output: Path, kind: str, root: Path) -> None:
    """Put a file of a user into a folder, unless the kind is empty."""
    path = output / kind
    if kind.endswith("link"):
        path.symlink_to(root / ("notes" if kind == "link" else "draft"))
    elif kind:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine\n", encoding="utf-8")


def _folder(root: Path, rng: random.Random) -> Case:
    """Return a case whose output is the folder of an earlier result, of a model, of another verb, or of notes."""
    verb = rng.choice(list(FOLDERS))
    output = root / rng.choice([verb] * 6 + ["model", "model/sub", "", "notes", "new", "run", *FOLDERS])
    written = _files(output) if output == root / verb else []
    kind = rng.choice(NOTES) if output.is_dir() and output != root else ""
    if (output / kind).exists():
        kind = ""
    _add_notes(output, kind, root)
    path = output
    if rng.random() < 0.2:
        path = root / "link"
        path.symlink_to(output)
    words = _with_output(_absolute(FOLDERS[verb], root), path)
    words += ["--overwrite"] * (rng.random() < 0.8)
    # Only the result of the same verb may be replaced, and only on demand.
    replaced = [file for file in written if "--overwrite" in words and file.name != "README.md"]
    guarded = [file for file in _files(root) if file not in replaced]
    return Case(f"{verb} on {output.relative_to(root)} {path.name} with {kind!r} {words[-1]}", words, guarded=guarded)


def _run(root: Path, rng: random.Random) -> Case:
    """Return a case that trains into a folder with files of a user, an earlier run, or the model to fine-tune."""
    output = root / rng.choice(("", "model", "run", "average", "tokenize", "mine", "mine", "mine", "mine", "notes"))
    (root / "mine").mkdir()
    _add_notes(root / "mine", rng.choice(NOTES), root)
    for name in rng.sample(("pairs.tsv", "recipe.yaml", "metrics.json", "train_log.txt", "test_predictions.txt"), 2):
        shutil.copy2(root / "pairs.tsv", root / "mine" / name)
    fine_tuned = {name: value for name, value in BASE.items() if name not in ("tokenizer_kind", "preset", "model")}
    fine_tuned["model_name_or_path"] = str(root / "model")
    words = train_words(root, rng.choice((BASE, BASE, fine_tuned)), root / "recipe")
    if rng.random() < 0.4:
        # The recipe lies in the folder of the run.
        words[1] = str(shutil.copy2(words[1], root / "mine" / "recipe.yaml"))
    words[-1] = str(output)
    words += rng.choice(([], [], ["--resume"]))
    # A run that resumes goes on in its own folder.
    guarded = [file for file in _files(root) if "--resume" not in words or root / "run" not in file.parents]
    return Case(f"train into {os.path.relpath(output, root)} {words[1:2]} {words[4:]}", words, guarded=guarded)
