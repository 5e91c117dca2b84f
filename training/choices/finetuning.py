"""Choices for fine-tuning: limits of length, and the optimizer by family and size of the base.

docs/choices.md lists the source of each rate, and a measurement with small bases.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig

from metaphrase.data.pairs import CorpusProfile
from metaphrase.training.choices.rules import (
    TokenProfile,
    bleu_tokenize,
    choose_evaluation,
    duration,
    side_kind,
    tokens_per_update,
    with_margin,
)
from metaphrase.training.recipe.recipe import Recipe

# Tokens of a side. Longer texts are truncated.
_MAX_LENGTH = 1024
# A source that is so much longer than its target is summarized.
_SUMMARY_RATIO = 4
LORA_RANK, _LORA_FACTOR, _MAX_LORA_RATE = 16, 10, 1e-3
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


def choose_limits(
    recipe: Recipe, lengths: Mapping[str, np.ndarray], profile: CorpusProfile, longest: int | None
) -> Recipe:
    """Choose limits of length from tokenized texts, and the scores of summaries.

    Args:
        recipe: The recipe.
        lengths: Tokens of some texts of each side.
        profile: Profile of the pairs.
        longest: Maximum tokens per side that the model can read; None if there is no end.
    """
    most = longest or _MAX_LENGTH
    for side, tokens in lengths.items():
        limit = min(most, with_margin(np.quantile(tokens, 0.999)))
        reason = "the model reads no more" if limit == most else f"nearly all {side}s are shorter (99.9 %)"
        recipe = recipe.choose(reason, **{f"max_{side}_length": limit})
    if share := np.mean(np.concatenate([*lengths.values()]) > most):
        reason = f"{100 * share:.1f} % of the texts have more than {most} tokens"
        recipe = recipe.choose(reason, too_long="truncate")
    is_short = profile.source.mean_characters > _SUMMARY_RATIO * profile.target.mean_characters
    # ROUGE finds no words in text without spaces.
    has_words = bleu_tokenize(profile.target) is None
    if is_short and has_words and side_kind(profile.target, profile.source) == "byte_bpe":
        recipe = recipe.choose("sources are much longer than targets, as in summaries", metrics=["rouge", "chrf"])
    return recipe


def choose_finetuning(
    recipe: Recipe,
    tokens: TokenProfile,
    config: PreTrainedConfig,
    num_beams: int,
    step_seconds: float,
    seconds: float | None,
) -> tuple[Recipe, float]:
    """Choose optimizer, length of the run, and evaluation by the base model.

    Args:
        recipe: The recipe, with the choices from text and its batches.
        tokens: Tokens of one epoch.
        config: Configuration of the base.
        num_beams: Beams of the base.
        step_seconds: Duration of an optimizer step; 0 if it is unknown.
        seconds: Time for training; None if there is no limit.

    Returns:
        The recipe, and the seconds of all steps; 0 if the speed is unknown.
    """
    budget = tokens_per_update(recipe, tokens)
    if recipe.is_open("max_steps", "num_train_epochs"):
        updates = finetuning_updates(tokens, budget)
        reason = f"{updates * budget / tokens.both:.0f} epochs: few pairs are repeated more often"
        if seconds is not None and step_seconds * updates > seconds:
            reason = f"{reason}; {100 * seconds / (step_seconds * updates):.0f} % of them fit into the time"
            updates = max(1, int(seconds / step_seconds))
        elif step_seconds:
            reason = f"{reason}; about {duration(updates * step_seconds)} on this machine"
        recipe = recipe.choose(reason, max_steps=updates)
    else:
        epochs = math.ceil(recipe.num_train_epochs * tokens.both / budget)
        updates = recipe.max_steps if recipe.max_steps > 0 else epochs
    family = family_of(config)
    rule = RULES.get(family, _BART)
    rate, source = rule.learning_rate(config.hidden_size), f"a {family} of width {config.hidden_size}: {rule.source}"
    if recipe.lora_rank is not None:
        rate, source = min(_MAX_LORA_RATE, _LORA_FACTOR * rate), f"{source}, and {_LORA_FACTOR} times the rate for LoRA"
    recipe = recipe.choose(source, learning_rate=rate, lr_scheduler_type="cosine", warmup_steps=updates // 10)
    regularization = {"label_smoothing_factor": rule.label_smoothing, "weight_decay": rule.weight_decay}
    recipe = recipe.choose(f"usual for {family}", **regularization, adam_beta2=0.999, max_grad_norm=1.0)
    if num_beams > 1 and not recipe.choose_decoding:
        recipe = recipe.choose("the base model has them", num_beams=num_beams)
    return choose_evaluation(recipe, tokens, updates), updates * step_seconds


def finetuning_updates(tokens: TokenProfile, budget: int) -> int:
    """Return the updates of 10 epochs of 1,000 pairs, falling to 3 epochs of 120,000; at least 300 within 30 epochs."""
    epochs = max(3, min(10, 10 * (1000 / tokens.pairs) ** 0.25))
    batches = tokens.both / budget
    return max(1, math.ceil(max(epochs * batches, min(_MIN_UPDATES, _MAX_EPOCHS * batches))))
