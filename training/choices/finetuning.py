"""Choices for fine-tuning: limits of length, batches that memory holds, and the optimizer by family and size of the base.

docs/choices.md lists the source of each rate, and a measurement with small bases.
"""

import importlib.util
import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from metaphrase.data.pairs import SIDES
from metaphrase.data.profile import CorpusProfile
from metaphrase.training.choices.rules import (
    BATCH_SIZES,
    OpenRecipe,
    TokenProfile,
    bleu_tokenize,
    choose_evaluation,
    duration,
    side_kind,
    tokens_of_batch,
    tokens_per_update,
)
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.estimate import RunEstimate, dry_run

logger = logging.getLogger(__name__)

_SAMPLE_PAIRS = 2000
# Tokens of a side. Longer texts are truncated.
_MAX_LENGTH = 1024
# A source that is so much longer than its target is summarized.
_SUMMARY_RATIO = 4
_LORA_RANK, _LORA_FACTOR, _MAX_LORA_RATE = 16, 10, 1e-3
_MIN_UPDATES, _MAX_EPOCHS = 300, 30


@dataclass(frozen=True)
class FamilyRule:
    """Optimizer for one family of base models.

    Attributes:
        rate: Learning rate of AdamW at `width`. Wider models have lower rates.
        width: Hidden size of the models that the rate is for.
        label_smoothing: Label smoothing.
        weight_decay: Weight decay.
        source: Origin of the numbers.
    """

    rate: float
    width: int
    label_smoothing: float
    weight_decay: float
    source: str

    def learning_rate(self, width: int) -> float:
        """Return the rate for a hidden size, by the exponent of new networks, within a factor of 4."""
        factor = min(4.0, max(0.25, (self.width / width) ** 0.75))
        return float(f"{self.rate * factor:.2g}")


_T5 = FamilyRule(3e-4, 1024, 0.0, 0.0, "advice for T5 with AdamW in transformers")
_BART = FamilyRule(3e-5, 1024, 0.1, 0.01, "fine-tuning of BART in fairseq")
_PEGASUS = FamilyRule(1e-4, 1024, 0.1, 0.0, "fine-tuning of Pegasus in transformers")
_MARIAN = FamilyRule(6e-5, 512, 0.1, 0.0, "a fifth of the rate that trains a Marian")
# A family that is missing here is taken for a BART.
RULES = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    "bart": _BART,
    "mbart": FamilyRule(3e-5, 1024, 0.2, 0.0, "Liu et al. 2020, section 3.1"),
    **dict.fromkeys(("pegasus", "bigbird_pegasus", "pegasus_x"), _PEGASUS),
    "m2m_100": FamilyRule(5e-5, 1024, 0.1, 0.0, "between those of M2M-100 in fairseq and NLLB"),
    **dict.fromkeys(("marian", "fsmt"), _MARIAN),
    "metaphrase": FamilyRule(1e-3, 256, 0.1, 0.01, "half of the rate of a new network"),
}


def family_of(config: PreTrainedConfig) -> str:
    """Return the family of a base model; that of the original for a converted model."""
    if config.model_type != "metaphrase":
        return config.model_type
    if config.attention_scale == 1.0:
        return "t5"
    if config.train_padding_embedding:
        return "metaphrase"
    if config.position_embedding_type == "learned":
        return "bart"
    return "marian" if config.sinusoidal_layout == "half_split" else "m2m_100"


def choose_limits(recipe: OpenRecipe, first: Experiment, profile: CorpusProfile) -> None:
    """Choose limits of length from tokenized texts, and the scores of summaries.

    Args:
        recipe: The recipe.
        first: An experiment with its pairs.
        profile: Profile of the pairs.
    """
    train, tokenizers = first.corpus.splits["train"], first.make_tokenizers()
    sample = train.select(range(0, len(train), -(-len(train) // _SAMPLE_PAIRS)))
    most, longer = first.corpus.longest or _MAX_LENGTH, 0
    for side, encode in zip(SIDES, (tokenizers.encode_sources, tokenizers.encode_targets), strict=True):
        lengths = np.array([len(ids) for ids in encode(sample[side][:])])
        limit = min(most, 16 * math.ceil((1.2 * np.quantile(lengths, 0.999) + 8) / 16))
        reason = "the model reads no more" if limit == most else f"nearly all {side}s are shorter (99.9 %)"
        recipe.choose(reason, **{f"max_{side}_length": limit})
        longer += int((lengths > most).sum())
    if longer:
        recipe.choose(
            f"{50 * longer / len(sample):.1f} % of the texts have more than {most} tokens", too_long="truncate"
        )
    is_short = profile.source.mean_characters > _SUMMARY_RATIO * profile.target.mean_characters
    # ROUGE finds no words in text without spaces.
    has_words = bleu_tokenize(profile.target) is None
    if is_short and has_words and side_kind(profile.target, profile.source) == "byte_bpe":
        recipe.choose("sources are much longer than targets, as in summaries", metrics=["rouge", "chrf"])


def choose_finetuning(
    recipe: OpenRecipe, experiment: Experiment, tokens: TokenProfile, seconds: float | None, memory: float
) -> float:
    """Choose batches, optimizer, length of the run, and evaluation by the base model.

    Args:
        recipe: The recipe, with the choices from text.
        experiment: An experiment with its pairs encoded.
        tokens: Tokens of one epoch.
        seconds: Time for training; None if there is no limit.
        memory: Bytes that tensors may take.

    Returns:
        Seconds of all updates; 0 if the speed is unknown.
    """
    tokenizers, _ = experiment.prepare()
    with torch.device("meta"):
        model = experiment.make_model(tokenizers, with_weights=False)
    config, beams = model.config, model.generation_config.num_beams or 1
    budget = tokens_per_update(experiment.recipe, tokens)
    choose_batches(recipe, experiment, tokens, budget, config, memory)
    estimate = _estimate(recipe, experiment, devices=None)
    pace = 3600 * (estimate.hours or 0.0) / estimate.data.steps
    updates = finetuning_updates(tokens, budget)
    if recipe.is_open("max_steps", "num_train_epochs"):
        reason = f"{updates * budget / tokens.both:.0f} epochs: few pairs are repeated more often"
        if seconds is not None and pace * updates > seconds:
            reason = f"{reason}; {100 * seconds / (pace * updates):.0f} % of them fit into the time"
            updates = max(1, int(seconds / pace))
        elif pace:
            reason = f"{reason}; about {duration(updates * pace)} on this machine"
        recipe.choose(reason, max_steps=updates)
    else:
        updates = estimate.data.steps
    family = family_of(config)
    rule = RULES.get(family, _BART)
    rate, source = rule.learning_rate(config.hidden_size), f"a {family} of width {config.hidden_size}: {rule.source}"
    if recipe.recipe.lora_rank is not None:
        rate, source = min(_MAX_LORA_RATE, _LORA_FACTOR * rate), f"{source}, and {_LORA_FACTOR} times the rate for LoRA"
    recipe.choose(source, learning_rate=rate, lr_scheduler_type="cosine", warmup_steps=updates // 10)
    regularization = {"label_smoothing_factor": rule.label_smoothing, "weight_decay": rule.weight_decay}
    recipe.choose(f"usual for {family}", **regularization, adam_beta2=0.999, max_grad_norm=1.0)
    if beams > 1 and not recipe.recipe.choose_decoding:
        recipe.choose("the base model has them", num_beams=beams)
    choose_evaluation(recipe, tokens, updates)
    return updates * pace


def finetuning_updates(tokens: TokenProfile, budget: int) -> int:
    """Return the updates of 10 epochs of 1,000 pairs, falling to 3 epochs of 120,000; at least 300 within 30 epochs."""
    epochs = max(3, min(10, 10 * (1000 / tokens.pairs) ** 0.25))
    batches = tokens.both / budget
    return max(1, math.ceil(max(epochs * batches, min(_MIN_UPDATES, _MAX_EPOCHS * batches))))


# Memory


def choose_batches(
    recipe: OpenRecipe,
    experiment: Experiment,
    tokens: TokenProfile,
    budget: int,
    config: PreTrainedConfig,
    memory: float,
) -> None:
    """Split an update into batches that memory holds. Choose an adapter if memory holds no batch of all weights."""
    batches = [{"max_tokens_per_batch": budget}]
    # The longest pair may be padded.
    while (half := budget >> len(batches)) >= tokens.longest + 2 * experiment.pad_to_multiple_of:
        batches.append({"max_tokens_per_batch": half, "gradient_accumulation_steps": budget // half})
    if not recipe.is_open("gradient_accumulation_steps"):
        size = tokens_of_batch(tokens, budget, recipe.recipe.gradient_accumulation_steps)
        batches = [{"max_tokens_per_batch": size}]
    if not recipe.is_open(*BATCH_SIZES):
        batches = [{}]
    needed, has_peft = [], importlib.util.find_spec("peft") is not None
    can_adapt = has_peft and recipe.is_open("lora_rank", "freeze", "average_best", "average_last")
    for adapter in ({}, {"lora_rank": _LORA_RANK}) if can_adapt else ({},):
        for fields in batches:
            needed.append(peak_memory(_estimate(recipe, experiment, **fields, **adapter), config))
            if needed[-1] <= memory:
                if adapter:
                    recipe.choose(f"training all weights takes {needed[0] / 2**30:.1f} GiB of memory", **adapter)
                held = "" if fields is batches[0] else ", and memory holds no more in one batch"
                recipe.choose(f"an epoch has {tokens.both:,} tokens{held}", **fields)
                return
    recipe.choose("the smallest that holds each pair", **batches[-1])
    logger.warning(
        "Training takes about %.1f GiB, and %.1f GiB are free. Install metaphrase[lora] for `lora_rank`, or choose a smaller "
        "model.",
        *(size / 2**30 for size in (needed[-1], memory)),
    )


def peak_memory(estimate: RunEstimate, config: PreTrainedConfig) -> float:
    """Return the bytes of a step. Activations of other families follow the formula for half precision.

    Source: Korthikanti et al. 2022, equation 1, arXiv 2205.05198.
    """
    if estimate.activations is not None:
        return estimate.peak
    batch, heads = estimate.largest_batch, config.num_attention_heads
    source = batch.source_tokens * (34 * config.hidden_size + 5 * heads * batch.longest_source)
    # The decoder has a second attention, to all of the source.
    widths = batch.longest_source + batch.longest_target
    target = batch.target_tokens * (45 * config.hidden_size + 5 * heads * widths)
    layers = config.num_hidden_layers * (source + target) * estimate.precision.compute_bytes / 2
    # Logits, their softmax and their gradient are in float32.
    return estimate.peak + layers + 12 * batch.target_tokens * getattr(config, "vocab_size", 0)


def _estimate(recipe: OpenRecipe, experiment: Experiment, devices: int | None = 1, **fields) -> RunEstimate:
    """Return the estimate of a run with these fields. Steps are timed unless `devices` is given."""
    trial = OpenRecipe(recipe.recipe)
    trial.choose("", **fields)
    timed = Experiment(trial.recipe, is_dry_run=True)
    timed.take_data(experiment)
    return dry_run(timed, devices)
