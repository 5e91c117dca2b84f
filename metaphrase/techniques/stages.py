"""Stages: several trainings in one run, the last of which makes the finished model.

The output directory holds the finished model, and `stages/` what led to it: the recipe with its stages, the pairs, and a folder
for each earlier model. A finished stage is not repeated, so that a stopped run goes on where it was.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from metaphrase.choices.completion import read_corpus
from metaphrase.data.pairs import COLUMN_TYPES, SPLITS, data_seed
from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.evaluation.metrics import write_metrics
from metaphrase.inference import Generator
from metaphrase.storage.folders import ENSEMBLE_NAME, read_fields, write_json
from metaphrase.techniques import plain_text
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER
from metaphrase.training import checkpoints
from metaphrase.training.callbacks import parse_seconds
from metaphrase.training.distributed import from_first_process, join_processes
from metaphrase.training.experiment import Experiment, make_arguments
from metaphrase.training.recipe.fields import OWN_FIELDS, group_of
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

# Names of stages that learn from targets to sources, and that write sources for plain text. Others train the model.
REVERSE, BACKTRANSLATE = "reverse", "backtranslate"
_STATE_NAME = "state.json"
# Share of its updates that a reverse model needs to write sources that teach more than they mislead.
_LEAST_UPDATES = 0.25
# Fields of the whole run.
_OF_RUN = ("stages", "num_seeds", "monolingual_target", "output_dir", "time_budget", "resume_from_checkpoint")
# Fields that come with the weights that a stage begins with.
_OF_WEIGHTS = ("preset", "model", *(name for name in OWN_FIELDS if group_of(name) == "tokenizer"))
_TRAINING_PAIRS = ("train_file", "train_source_file", "train_target_file", "train_text_file", "dataset_name", "tasks")
_PAIRS = ("dataset_name", *(f"{split}{kind}" for split in SPLITS for kind in ("_file", "_source_file", "_target_file")))
_PAIRS += (*(f"{name}_column" for name in COLUMN_TYPES), "num_validation", "num_test", "keep_rare_words")
_PAIRS += (*(f"max_{split}_samples" for split in SPLITS), *(f"dataset_{split}_split" for split in SPLITS))
# Fields of the targets by those of the sources.
_EXCHANGED = {"max_source_length": "max_target_length", "source_lang": "target_lang"}
_EXCHANGED |= {"source_language": "target_language", "source_column": "target_column"}
_EXCHANGED |= {target: source for source, target in _EXCHANGED.items()}
# These are exchanged if both are given: one alone is that of both sides.
_OF_TWO_TOKENIZERS = [(name, f"target_{name}") for name in ("tokenizer_name_or_path", "tokenizer_kind", "vocab_size")]
Train = Callable[..., tuple[Experiment, dict]]


def run_stages(recipe: Recipe, train: Train, is_dry_run: bool, started: float | None) -> tuple[Experiment, dict]:
    """Train by the stages of a recipe, or by those that are chosen for its plain text and its seeds.

    Args:
        train: Trains one model by a recipe, and returns the experiment and its scores.
        is_dry_run: True to show the stages, and what the last one or that with its first weights needs, without written pairs.
        started: Beginning of `time_budget`, in seconds of `time.time()`; None for now.

    Returns:
        The last experiment, and the content of `metrics.json`.

    Raises:
        MetaphraseError: If the recipe, its data or its stages are refused.
    """
    join_processes(recipe)
    recipe = choose_stages(recipe)
    check_stages(recipe)
    run = _StagedRun(recipe, train, time.time() if started is None else started)
    is_first_process = make_arguments(recipe).process_index == 0
    if is_first_process:
        run.show()
    if is_dry_run:
        name = run.last
        while (start := run.stages[name].get("start")) and not (run.work / start).exists():
            name = start
        return train(run.recipe_of(name), True, None)
    # The last stage locks the output directory.
    with checkpoints.only_writer(run.work) if is_first_process else contextlib.nullcontext():
        return run.run()


def choose_stages(recipe: Recipe) -> Recipe:
    """Return the recipe with stages, if it has none: a reverse model for plain text, which writes sources, and the model."""
    if recipe.monolingual_target is None:
        return recipe.choose("seeds alone make the models differ", stages={"model": {}})
    shares = {REVERSE: 0.2, BACKTRANSLATE: 0.1, "model": 0.7}
    reason = "the model learns from all pairs and needs most of the time"
    return recipe.choose(reason, stages={name: {"share": share} for name, share in shares.items()})


def check_stages(recipe: Recipe) -> None:
    """Refuse stages with unknown fields, in another order, or that begin with the weights of no earlier one."""
    if isinstance(resume := recipe.resume_from_checkpoint, str):
        raise MetaphraseError(f"`resume_from_checkpoint` must be true with `stages`, got {resume!r}.")
    if recipe.monolingual_target is not None:
        # A missing file is an error before pairs are read.
        recipe.data_path("monolingual_target")
    earlier: list[str] = []
    for name, fields in recipe.stages.items():
        for field, value in fields.items():
            path = f"stages.{name}.{field}"
            if field == "start" and value not in earlier:
                raise MetaphraseError(
                    f"`{path}` must be an earlier stage, got {value!r}.{did_you_mean(value, earlier)}"
                )
            if field == "share" and (not isinstance(value, int | float) or not value > 0):
                raise MetaphraseError(f"`{path}` must be a number above 0, got {value!r}.")
            if field in _OF_RUN:
                raise MetaphraseError(f"`{path}` must be left out, because it is a field of the whole run.")
            if field not in ("start", "share"):
                group_of(field, f"`stages.{name}`")
        if name == BACKTRANSLATE and (REVERSE not in earlier or recipe.monolingual_target is None):
            raise MetaphraseError(f"`stages.{name}` must come with `monolingual_target` and after a stage `{REVERSE}`.")
        earlier.append(name)
    if name in (REVERSE, BACKTRANSLATE):
        raise MetaphraseError(f"`stages` must end with the training of the model, got {name!r}.")


def without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return fields without some of them."""
    return {name: value for name, value in fields.items() if name not in names}


class _StagedRun:
    """A run of several stages. `done` has what each finished step has left, by its name."""

    def __init__(self, recipe: Recipe, train: Train, started: float):
        self.recipe, self.train, self.folder = recipe, train, Path(recipe.output_dir)
        self.work, self.done = self.folder / checkpoints.STAGES_NAME, {}
        budget = recipe.time_budget
        self.deadline = math.inf if budget is None else started + parse_seconds(budget)
        self.stages = {name: {"share": 1.0, **fields} for name, fields in recipe.stages.items()}
        self.seeds: list[str] = []
        if recipe.num_seeds > 1:
            _, last = self.stages.popitem()
            last |= {"share": last["share"] / recipe.num_seeds, "data_seed": data_seed(recipe)}
            for seed in range(recipe.seed, recipe.seed + recipe.num_seeds):
                self.seeds.append(f"seed_{seed}")
                self.stages[f"seed_{seed}"] = {**last, "seed": seed}
        *_, self.last = self.stages

    def show(self) -> None:
        """Log what each stage does, and its share of the time."""
        total, lines = sum(fields["share"] for fields in self.stages.values()), []
        for name, fields in self.stages.items():
            text = "trains the model"
            if name == REVERSE:
                text = "trains a model that writes the source of a target"
            elif name == BACKTRANSLATE:
                text = f"writes sources for lines of {self.recipe.monolingual_target}"
            elif "start" in fields:
                text += f", from the weights of {fields['start']}"
            elif BACKTRANSLATE in self.stages:
                text += " on the pairs and the synthetic ones"
            share = "" if self.deadline == math.inf else f", in {fields['share'] / total:.0%} of the time"
            lines.append(f"  {name} {text}{share}")
        logger.info("Stages, to be saved in %s:\n%s", self.work / checkpoints.RECIPE_NAME, "\n".join(lines))

    def run(self) -> tuple[Experiment, dict]:
        recipe, result = self.recipe, {}
        if recipe.resume_from_checkpoint and checkpoints.holds_run(self.work):
            checkpoints.check_same_run(recipe, self.work)
            self.done = read_fields(self.work / _STATE_NAME) or {}
        else:
            for folder in (self.folder, self.work):
                checkpoints.refuse_content(recipe, folder)
        if recipe.monolingual_target is not None and "data" not in self.done:
            corpus = read_corpus(recipe.replace(source_prefix=None))[1]
            self._once("data", partial(plain_text.write_data, corpus, self.work))
        from_first_process(lambda: recipe.save(self.work / checkpoints.RECIPE_NAME))
        for number, (name, fields) in enumerate(self.stages.items(), start=1):
            if name in self.done and name != self.last:
                continue
            logger.info("Stage %d of %d: %s", number, len(self.stages), name)
            held = self.done.get(REVERSE, {}).get("updates", 1.0)
            if name == BACKTRANSLATE and self.deadline != math.inf and held < _LEAST_UPDATES:
                logger.warning(
                    "The time held %.0f %% of the updates of the reverse model, whose sources would mislead. So the model "
                    "learns from the pairs alone. Give more time to learn from the text.",
                    100 * held,
                )
                self._once(name, lambda: {"lines": 0})
                continue
            if name == BACKTRANSLATE:
                options = without(fields, ["share"])
                self._once(name, partial(plain_text.write_sources, self.work, name, options, self._seconds(name)))
                continue
            start = time.time()
            experiment, result = self.train(self.recipe_of(name), False, start)
            if experiment.interrupt.has_ended:
                # The user has ended the run.
                return experiment, result
            self.done.pop(name, None)
            left = {"seconds": round(time.time() - start), "scores": result.get("scores", {})}
            state = read_fields(experiment.folder / TRAINER_STATE_NAME) or {"global_step": 1, "max_steps": 1}
            left["updates"] = state["global_step"] / state["max_steps"]
            self._once(name, lambda left=left: left)
        return experiment, self._join(experiment) if self.seeds else result

    def _once(self, name: str, work: Callable[[], dict]) -> None:
        """Let the first process do a step that is not finished, and save what it leaves."""
        if name not in self.done:
            self.done[name] = from_first_process(work)
            from_first_process(lambda: write_json(self.work / _STATE_NAME, self.done))

    def _seconds(self, name: str) -> float:
        """Return the time of a stage: its share of the time that is left."""
        left = without(self.stages, self.done.keys() - {name})
        total = sum(fields["share"] for fields in left.values())
        return max(1.0, self.deadline - time.time()) * self.stages[name]["share"] / total

    def recipe_of(self, name: str) -> Recipe:
        """Return the recipe of a stage. Before the data are written, as in a dry run, it reads the files of the run."""
        run, fields = self.recipe, dict(self.stages[name])
        del fields["share"]
        shared = without({field: getattr(run, field) for field in run.set_names}, _OF_RUN)
        has_pairs = any(field in fields for field in _TRAINING_PAIRS)
        if has_pairs or "data" in self.done:
            is_other_kind = "tasks" in fields or "objective" in fields
            shared = without(shared, _PAIRS if is_other_kind or not has_pairs else _TRAINING_PAIRS)
        if "data" in self.done and not has_pairs:
            shared |= self._written_pairs(shared, name)
        if name == REVERSE:
            shared = without(shared, ["source_prefix"])
            both = [pair for pair in _OF_TWO_TOKENIZERS if shared.keys() >= {*pair}]
            exchanged = _EXCHANGED | dict(both) | {other: one for one, other in both}
            shared = {exchanged.get(field, field): value for field, value in shared.items()}
        if (start := fields.pop("start", None)) is not None:
            shared = without(shared, _OF_WEIGHTS) | {"model_name_or_path": str(self.work / start)}
        is_finished = name == self.last and not self.seeds
        folder = self.folder if is_finished else self.work / name
        resume = {"output_dir": str(folder), "resume_from_checkpoint": run.resume_from_checkpoint}
        recipe = Recipe.from_mapping(shared | fields, f"`stages.{name}`").replace(**resume)
        if self.deadline != math.inf:
            recipe = recipe.replace(time_budget=f"{self._seconds(name):.0f}s")
        first = self.work / self.seeds[0] if self.seeds else folder
        if folder != first and checkpoints.holds_run(first):
            # The first model has made the choices for all.
            resumed = recipe.replace(resume_from_checkpoint=True)
            recipe = checkpoints.with_fields_of_run(resumed, first).replace(**resume)
        return recipe

    def _written_pairs(self, shared: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the fields of pairs that earlier steps have written. The tag of synthetic sources is a token if it can be."""
        data = self.done["data"]
        splits = [split for split in SPLITS if split in data["pairs"] and (name, split) != (REVERSE, "test")]
        fields: dict[str, Any] = {"data_dir": str(self.work), **{f"{split}_file": f"{split}.jsonl" for split in splits}}
        fields |= {"source_column": "source", "target_column": "target"}
        tokens = data["special_tokens"]
        if self.done.get(BACKTRANSLATE, {}).get("lines") and name != REVERSE:
            fields["train_file"] = plain_text.MIXTURE_NAME
            is_joint = not (self.work / REVERSE / TARGET_SUBFOLDER).is_dir()
            if is_joint and "lora_rank" not in shared:
                tokens = [*tokens, plain_text.TAG]
                is_new = not {"tokenizer_name_or_path", "model_name_or_path"} & shared.keys()
                fields |= {"joint_vocabulary": True} if is_new else {}
                fields["suppress_tokens"] = [*(shared.get("suppress_tokens") or ()), plain_text.TAG]
        return fields | ({"additional_special_tokens": tokens} if tokens else {})

    def _join(self, experiment: Experiment) -> dict:
        """Make the folder an ensemble of the models of all seeds, and return its scores."""
        if experiment.arguments.process_index != 0:
            return {}
        write_json(self.folder / ENSEMBLE_NAME, {"models": [f"{self.work.name}/{name}" for name in self.seeds]})
        sizes = {"batch_size": experiment.arguments.per_device_eval_batch_size}
        ensemble = Generator.from_pretrained(self.folder, max_source_length=experiment.corpus.longest[0], **sizes)
        result = experiment.evaluate(ensemble, self.folder)
        if result:
            result["models"] = {name: self.done[name]["scores"] for name in self.seeds}
            write_metrics(self.folder, result)
        return result
