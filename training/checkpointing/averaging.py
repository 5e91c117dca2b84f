"""Averaging: the mean of the weights of several checkpoints, as a folder that loads like any of them.

Source: Vaswani et al. 2017, section 6.1, arXiv 1706.03762, where the last checkpoints of a run are averaged.
"""

import contextlib
import fnmatch
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from metaphrase.storage.folders import check_output, folder_in_one_step, read_json
from metaphrase.storage.weight_files import WeightFiles
from metaphrase.training.checkpointing.folders import PROGRESS_NAME, checkpoints_in, step_of
from metaphrase.training.exponential_average import EXPONENTIAL_AVERAGE_NAME

logger = logging.getLogger(__name__)

DEFAULT_METRIC = "eval_bleu"
LOWER_IS_BETTER = ("loss", "perplexity", "ter", "wer", "cer")
RECIPE_NAME = "recipe.yaml"
# What says of which checkpoints a folder is the mean, and so that it may be overwritten.
PROVENANCE_NAME = "average.json"
# Of one checkpoint or its run, and untrue of the mean: weights, the trainer's state, what is pickled, results.
LEFT_OUT = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", TRAINER_STATE_NAME, PROGRESS_NAME)
LEFT_OUT += (PROVENANCE_NAME, "metrics.json", "*_predictions.txt", "README.md", ".*")
# Which tokens the weights stand for.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "target_vocab.json", "vocab.txt", "merges.txt", "spiece.model")
_VOCABULARIES += ("source.spm", "target.spm", "sentencepiece.bpe.model")
# Of configurations these say where they come from, not what the model is.
_UNIMPORTANT = ("_name_or_path", "transformers_version")


def select_checkpoints(
    run_folder: str | os.PathLike,
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    log_history: Sequence[Mapping] | None = None,
    or_fewer: bool = False,
) -> list[Path]:
    """Chooses checkpoints of a run among those that still exist.

    Args:
        run_folder: The trainer's output folder, with `checkpoint-*` folders.
        last: Take so many, by step.
        best: Or so many by their score, of equals the later ones.
        metric: Name of the score in the trainer's log; `eval_` may be left out. Losses, perplexities and error rates are better
            when they are lower, all else when it is higher.
        log_history: The trainer's log, where it is at hand; else it is read from the latest `trainer_state.json` of the run.
        or_fewer: Where there are fewer, take those that there are, with a warning.

    Returns:
        Folders, the last or the best one at the end.

    Raises:
        ValueError: If not exactly one number is given, or there are fewer checkpoints (or scores of them), or none.
    """
    if (last is None) == (best is None):
        raise ValueError(f"Exactly one of `last` and `best` must be given, got {last} and {best}.")
    if metric is not None and best is None:
        raise ValueError(f"`metric` must come with `best`, got {metric!r} without.")
    field, number = ("last", last) if best is None else ("best", best)
    if number < 1:
        raise ValueError(f"`{field}` must be at least 1, got {number}.")
    run_folder = Path(run_folder)
    by_step = _checkpoints_by_step(run_folder)
    scores = dict.fromkeys(by_step, 0.0)
    if best is not None:
        log = _read_log(run_folder, by_step) if log_history is None else log_history
        scores = _scores(log, by_step, metric or DEFAULT_METRIC)
    if len(scores) < number:
        what = "checkpoints" if best is None else f"checkpoints with a score in `{metric or DEFAULT_METRIC}`"
        if not or_fewer or not scores:
            raise ValueError(
                f"`{field}` must be at most the number of {what}, {len(scores)} in {run_folder}, got {number}. "
                "A run keeps as many checkpoints as `save_total_limit` says."
            )
        logger.warning(
            "The %s %d %s were to be taken, but %s has only %d.", field, number, what, run_folder, len(scores)
        )
    return [by_step[step] for step in sorted(scores, key=lambda step: (scores[step], step))[-number:]]


def _checkpoints_by_step(run_folder: Path) -> dict[int, Path]:
    found = {step_of(path): path for path in checkpoints_in(run_folder)}
    if not found:
        raise ValueError(f"`run_folder` must hold folders `{PREFIX_CHECKPOINT_DIR}-*`, got none in {run_folder}.")
    return found


def _read_log(run_folder: Path, by_step: Mapping[int, Path]) -> list[dict]:
    places = [run_folder, *by_step.values()]
    states = [read_json(place / TRAINER_STATE_NAME) for place in places if (place / TRAINER_STATE_NAME).is_file()]
    if not states:
        raise ValueError(f"`best` needs the scores in `{TRAINER_STATE_NAME}`, got none in {run_folder}.")
    return max(states, key=lambda state: state.get("global_step", 0)).get("log_history", [])


def _scores(log: Sequence[Mapping], by_step: Mapping[int, Path], metric: str) -> dict[int, float]:
    """What each checkpoint scored, so that more is better."""
    if not _logged(log, metric):
        known = sorted({key for entry in log for key in entry if key.startswith("eval_")})
        which = f"one of {', '.join(known)}, got" if known else "where nothing was evaluated, got"
        raise ValueError(f"`metric` must be one that was logged, {which} {metric!r}.")
    if any((path / EXPONENTIAL_AVERAGE_NAME).is_file() for path in by_step.values()):
        logger.warning("The scores are those of exponential averages; the mean is one of the weights under them.")
    return {step: score for step, score in scores_in(log, metric).items() if step in by_step}


def is_better_lower(metric: str) -> bool:
    """Whether a metric is a loss, a perplexity or an error rate; it may be that of a task, and begin with `eval_`."""
    return metric.rpartition("_")[2] in LOWER_IS_BETTER


def scores_in(log: Iterable[Mapping], metric: str) -> dict[int, float]:
    """What a trainer's log says of a metric at each step, with a sign so that more is better."""
    sign = -1 if is_better_lower(metric) else 1
    # What is not a number compares with nothing.
    return {step: sign * score for step, score in _logged(log, metric).items() if not math.isnan(score)}


def _logged(log: Iterable[Mapping], metric: str) -> dict[int, float]:
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return {entry["step"]: entry[name] for entry in log if name in entry}


def average_checkpoints(
    folders: Sequence[str | os.PathLike], output: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Writes a folder with the mean of all weights, and with all else that the last folder holds of the model.

    Sums are in float64; the mean is stored in the checkpoints' own type, in files cut as the last checkpoint's. What is no
    floating-point number is taken from the last checkpoint. One tensor of one checkpoint is in memory at a time, beside its sum.
    Tokenizers, generation settings and code come from the last folder, the recipe from it or from the run that it lies in. The
    folder appears under its name only when it is complete.

    Args:
        folders: At least two, as `save_pretrained` or a trainer writes them, in safetensors.
        output: The folder to write.
        overwrite: Replace it if it exists and was written here.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If the folders do not hold the same model, or `output` cannot be had.
    """
    folders, output = [Path(folder) for folder in folders], Path(output)
    if len({folder.resolve() for folder in folders}) < max(len(folders), 2):
        names = ", ".join(map(str, folders)) or "none"
        raise ValueError(f"`folders` must be at least two, and different, got {names}.")
    check_output(output, folders, overwrite, PROVENANCE_NAME, "averaged")
    with contextlib.ExitStack() as files:
        checkpoints = [_Checkpoint(folder, files) for folder in folders]
        for other in checkpoints[:-1]:
            _check_equal(other, checkpoints[-1])
            _check_vocabularies(other.folder, checkpoints[-1].folder)
        with folder_in_one_step(output) as partial:
            left_out = _copy_rest(checkpoints[-1], partial)
            _write_weights(checkpoints, partial)
            names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
            (partial / PROVENANCE_NAME).write_text(json.dumps({"averaged": names}, indent=2) + "\n", encoding="utf-8")
    logger.info("Averaged %d checkpoints: %s.", len(folders), ", ".join(map(str, folders)))
    if left_out:
        logger.info("Left behind in %s: %s.", folders[-1], ", ".join(left_out))
    return output


class _Checkpoint(WeightFiles):
    """One checkpoint's configuration and weights."""

    def __init__(self, folder: Path, files: contextlib.ExitStack):
        super().__init__(folder, files)
        self.config = read_json(folder / CONFIG_NAME)


def _check_equal(checkpoint: _Checkpoint, last: _Checkpoint) -> None:
    """Names the first difference of two checkpoints in configuration, names, types and shapes."""
    where = f"in {checkpoint.folder} and in {last.folder}"
    for what, first, second in (
        (f"of {CONFIG_NAME}", checkpoint.config, last.config),
        ("of the weights", checkpoint.kinds, last.kinds),
    ):
        for name in sorted(first.keys() | second.keys()):
            ours, theirs = first.get(name, "nothing"), second.get(name, "nothing")
            if name not in _UNIMPORTANT and ours != theirs:
                raise ValueError(f"`{name}` {what} must be the same {where}, got {ours} and {theirs}.")


def _check_vocabularies(folder: Path, last: Path) -> None:
    """Refuses the mean of weights that stand for different tokens."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name not in _VOCABULARIES or len(path.relative_to(folder).parts) > 2 or not (last / name).is_file():
            continue
        if path.read_bytes() == (last / name).read_bytes():
            continue
        if path.suffix == ".json":
            ours, theirs = read_json(path), read_json(last / name)
            if path.name == "tokenizer.json":
                # Settings beside the vocabulary, of truncation for instance, may differ.
                ours, theirs = ([content.get(part) for part in ("model", "added_tokens")] for content in (ours, theirs))
            if ours == theirs:
                continue
        raise ValueError(f"The vocabulary in `{name}` must be the same in {folder} and in {last}: their tokens differ.")


def _copy_rest(checkpoint: _Checkpoint, output: Path) -> list[str]:
    """Copies all but weights and what is not of the model; returns the names of what stays behind."""
    folder, left_out = checkpoint.folder, []
    for path in sorted(folder.iterdir()):
        if path in checkpoint.paths or path.name == SAFE_WEIGHTS_INDEX_NAME:
            continue
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            shutil.copytree(path, output / path.name)
        elif path.is_dir() or any(fnmatch.fnmatchcase(path.name, pattern) for pattern in LEFT_OUT):
            left_out.append(path.name)
        else:
            shutil.copyfile(path, output / path.name)
    for recipe in (folder / RECIPE_NAME, folder.parent / RECIPE_NAME):
        if recipe.is_file():
            shutil.copyfile(recipe, output / RECIPE_NAME)
            break
    return left_out


def _write_weights(checkpoints: Sequence[_Checkpoint], output: Path) -> None:
    """Writes the last checkpoint's weight files anew, with the means in the tensors' places."""
    last, changed = checkpoints[-1], []
    for path in last.paths:
        header = _read_header(path)
        places = json.loads(header[8:])
        places.pop("__metadata__", None)
        with (output / path.name).open("wb") as file:
            file.write(header)
            # The format leaves no gap between the tensors: in the order of their places they make up the file.
            for name in sorted(places, key=lambda name: places[name]["data_offsets"]):
                if last.kinds[name].is_floating_point:
                    tensor = _mean(checkpoint.read(name) for checkpoint in checkpoints)
                else:
                    tensor = last.read(name)
                    if not all(torch.equal(tensor, checkpoint.read(name)) for checkpoint in checkpoints[:-1]):
                        changed.append(name)
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if (index := last.folder / SAFE_WEIGHTS_INDEX_NAME).is_file() and len(last.paths) > 1:
        shutil.copyfile(index, output / SAFE_WEIGHTS_INDEX_NAME)
    if changed:
        logger.warning("Whole numbers that differ are those of %s: %s.", last.folder, ", ".join(changed))


def _mean(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """In float64, in which the mean of equals is exactly what they are."""
    total, count, dtype = None, 0, None
    for tensor in tensors:
        total = tensor.to(torch.float64, copy=True) if total is None else total.add_(tensor.double())
        count, dtype = count + 1, tensor.dtype
        # The next one is read before the name is taken by it.
        del tensor
    return total.div_(count).to(dtype)


def _read_header(path: Path) -> bytes:
    """The first part of a safetensors file: eight bytes that say how long the JSON after them is, and that."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))
