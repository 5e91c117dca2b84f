"""Finish of a run: the mean of checkpoints, an adapter merged into its model, and the search that decodes best."""

import collections
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from metaphrase.evaluation.evaluate import ValidationSample
from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.adapters import is_adapted, merge_lora
from metaphrase.training.checkpointing.averaging import (
    DEFAULT_METRIC,
    average_checkpoints,
    is_better_lower,
    scores_in,
    select_checkpoints,
)
from metaphrase.training.checkpointing.folders import step_of
from metaphrase.training.checkpointing.sharding import load_pretrained_weights
from metaphrase.training.model_setup import remove_ineffective_settings
from metaphrase.training.recipe.fields import DECODING
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import MetaphraseTrainer

logger = logging.getLogger(__name__)

# Folder of a run that holds the mean until it is loaded.
_AVERAGE_NAME = "_average"


def average_run(recipe: Recipe, trainer: MetaphraseTrainer, run: Path) -> None:
    """Load the mean of the checkpoints that the recipe selects into the model. All processes must call it.

    Where the mean of the best scores worse than the best of them, because they are too different, the best is loaded.
    """
    if recipe.average_last is None and recipe.average_best is None:
        return
    metric = None if recipe.average_best is None else recipe.metric_for_best_model or DEFAULT_METRIC
    # Not `average`, which may be a mean that its owner has made.
    average, is_written = run / _AVERAGE_NAME, False
    folders: list[Path | None] = [average]
    if trainer.is_world_process_zero():
        numbers = {"last": recipe.average_last, "best": recipe.average_best}
        # A log file in the folder may belong to another run.
        log = trainer.state.log_history
        try:
            # A run that ended early may have fewer checkpoints. A single one is its own mean.
            folders = select_checkpoints(run, **numbers, metric=metric, log_history=log, or_fewer=True)
            if len(folders) > 1:
                # The best is the last one.
                best = [folders[-1]] if metric is not None else []
                folders, is_written = [average_checkpoints(folders, average, overwrite=True), *best], True
        except Exception as error:
            # On any error: the trained weights are in no file yet, and the other processes wait for the broadcast.
            folders = [None]
            logger.warning(
                "There is no mean of checkpoints: %s The finished model has the weights of step %d, the last one.",
                *(error, trainer.state.global_step),
            )
    folders = [*folders, None][:2]
    broadcast_object_list(folders)
    if folders[0] is not None:
        load_pretrained_weights(trainer.model, folders[0])
    if folders[1] is not None and _is_worse(trainer, metric, step_of(folders[1])):
        load_pretrained_weights(trainer.model, folders[1])
    trainer.accelerator.wait_for_everyone()
    if is_written:
        # `save_model` writes the mean to the folder of the run.
        shutil.rmtree(average)


def _is_worse(trainer: MetaphraseTrainer, metric: str, step: int) -> bool:
    """Return True if the model scores worse on the validation pairs than it did at a step. All processes must call it."""
    arguments = trainer.args
    is_loss_alone, arguments.prediction_loss_only = arguments.prediction_loss_only, not trainer.decodes
    # Unlike `evaluate`, it leaves the log of the run alone.
    metrics = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval").metrics
    arguments.prediction_loss_only = is_loss_alone
    now = scores_in([{**metrics, "step": step}], metric).get(step, -math.inf)
    before = scores_in(trainer.state.log_history, metric)[step]
    if now < before:
        logger.info(
            "The mean of the best checkpoints scores %.2f in %s, and the best of them %.2f: the best is the finished model.",
            *(abs(now), metric, abs(before)),
        )
    return now < before


def save_final(trainer: MetaphraseTrainer, tokenizers: TokenizerPair, run: Path) -> PreTrainedModel:
    """Save the model, with its adapter merged, and return it. All processes must call it."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not is_adapted(model):
        trainer.save_model()
        return trainer.whole_model()
    trainer.save_model(str(run / "adapter"))
    model = trainer.whole_model()
    if trainer.is_world_process_zero():
        model = merge_lora(model, run)
        tokenizers.save_pretrained(run)
    return model


BEAMS = 4
# A penalty above 1 favors longer targets.
LENGTH_PENALTIES = (1.0, 0.6, 1.5)
# Scores of text are compared with all penalties. Symbols and single words end where they must.
_TEXT_SCORES = ("bleu", "chrf", "chrf++", "ter", "rouge")
# Duration of a search with beams, relative to greedy search.
_BEAMS_COST = 2.0
# Points that early stopping may not cost.
_NOTICEABLE = 0.1


def is_choice_open(recipe: Recipe) -> bool:
    """Return True if the recipe leaves the settings of beams to `choose_decoding`."""
    return recipe.choose_decoding and recipe.is_open(*DECODING)


def final_share(recipe: Recipe, metrics: Sequence[str], num_scored: int, num_validation: int) -> float:
    """Return the duration of all that follows training, relative to an evaluation, which is greedy and may decode fewer pairs.

    `num_scored` is the number of pairs that the finished model is scored on, 0 if it is not scored.
    """
    num_decoded = min(num_validation, recipe.max_decoded_samples or num_validation)
    if not num_scored:
        return 0.0
    if not num_decoded:
        # No evaluation tells how long it takes.
        return 1.0
    is_open = is_choice_open(recipe)
    beams = _BEAMS_COST if is_open or (recipe.num_beams or 1) > 1 else 1
    choice = 1 + _BEAMS_COST * (len(_penalties(metrics[0])) + 1) if is_open and metrics else 0
    # The mean of checkpoints is evaluated once.
    return beams * num_scored / num_decoded + choice + (recipe.average_best is not None)


def fill_decoding(
    recipe: Recipe, generator: Generator, sample: ValidationSample, deadline: float, num_scored: int, folder: Path
) -> Recipe:
    """Set the search that the recipe leaves open, and return the recipe with it.

    The generation configuration of the generator's model is changed, and saved in `folder`. Scoring `num_scored` pairs must end
    before the deadline, in seconds of `time.time()`.
    """
    values, reason = choose_decoding(generator, sample, deadline, num_scored)
    logger.info("%s: %s", ", ".join(f"{name} {value}" for name, value in values.items()), reason)
    config = generator.model.generation_config
    for name, value in values.items():
        setattr(config, name, value)
    remove_ineffective_settings(config)
    config.save_pretrained(folder)
    reasons = {**recipe.reasons, "num_beams": reason}
    return recipe.replace(**values, reasons=reasons)


def choose_decoding(
    generator: Generator, sample: ValidationSample, deadline: float = math.inf, num_scored: int = 0
) -> tuple[dict[str, float], str]:
    """Compare greedy search with beams, and beams with several length penalties, by the first metric of the sample.

    The best beams are also tried with early stopping, which is faster, and the rule of fairseq, Marian and CTranslate2. It may
    end before the right target of a model whose other beams end soon, so that only a comparison tells.

    Returns:
        `num_beams`, with beams `length_penalty` too, `early_stopping` if it costs nothing, and the scores of all settings in one
        line.
    """
    metric, num_pairs = sample.scores.metrics[0], len(sample.sources)
    sign, duration, shown = -1 if is_better_lower(metric) else 1, 0.0, []
    best: tuple[float, dict[str, float]] = -math.inf, {"num_beams": 1}
    beams = [{"num_beams": BEAMS, "length_penalty": value} for value in _penalties(metric)]
    settings = collections.deque([best[1], *beams])
    # The final scores come after this search, and take as long for each pair.
    while settings and time.time() + duration * (1 + num_scored / num_pairs) < deadline:
        setting, start = settings.popleft(), time.perf_counter()
        texts = generator.generate(list(sample.sources), show_progress=False, **setting)
        duration = (1.0 if shown else _BEAMS_COST) * (time.perf_counter() - start)
        score = sign * sample.scores.compute(texts, sample.references)[metric]["score"]
        shown.append(f"{sign * score:.2f} with {_shown(setting)}")
        # The first of equal settings is the fastest.
        if score > best[0] or ("early_stopping" in setting and score > best[0] - _NOTICEABLE):
            best = score, setting
        if setting == beams[0] and best[1] != setting:
            break  # Beams bring nothing.
        if setting == beams[-1]:
            settings.append({**best[1], "early_stopping": True})
    if not shown:
        return best[1], "there is no time to compare beams"
    return best[1], f"{metric} of {num_pairs} validation pairs: {', '.join(shown)}"


def _penalties(metric: str) -> tuple[float, ...]:
    return LENGTH_PENALTIES if metric in _TEXT_SCORES else LENGTH_PENALTIES[:1]


def _shown(options: dict[str, float]) -> str:
    if options["num_beams"] == 1:
        return "greedy search"
    parts = [f"{options['num_beams']} beams"]
    if options["length_penalty"] != 1:
        parts.append(f"length penalty {options['length_penalty']}")
    if "early_stopping" in options:
        parts.append("early stopping")
    return " and ".join(parts)
