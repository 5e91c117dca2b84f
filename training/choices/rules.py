"""Rules that fill the open fields of a recipe, each with its reason.

docs/choices.md shows the measurements on 17 tasks of 500 to 117,000 pairs that the rules follow from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metaphrase.data.profile import CorpusProfile, SideProfile
from metaphrase.training.recipe.recipe import Recipe

# Symbols are words of a closed set, such as phonemes or commands: the next word of unseen text is hardly ever new.
_MAX_NEW_SYMBOLS, _MAX_SYMBOLS = 1e-3, 1000
# Share of new words on a side whose words are built from words of the other side, as in inflection.
_MANY_NEW_WORDS = 0.2
# In characters. Entries of a dictionary are shorter.
_SHORT_TEXT = 30
# Share of the targets' characters that the sources have too. Languages of one script share nearly all.
_SHARED_SCRIPT = 0.9
_BYTES_PER_PIECE = 2.5
_TEXT_NAMES = {"word": "symbols", "char": "single words", "byte_bpe": "text"}
_VALIDATION = ("validation_file", "validation_source_file", "dataset_validation_split", "num_validation")
_TOKENIZER = ("tokenizer_kind", "target_tokenizer_kind", "joint_vocabulary", "vocab_size", "target_vocab_size")
_TOKENIZER += ("tokenizer_name_or_path",)
_EVALUATION = ("eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end")
_EVALUATION += ("metric_for_best_model", "early_stopping_patience", "average_last", "average_best")
_EVALUATIONS = 12
# Greedy tokens of one evaluation during training.
_DECODED_TOKENS = 20_000


@dataclass(frozen=True)
class Choice:
    """Values for open fields, and the reason in one line."""

    values: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{shown}: {self.reason}"


class OpenRecipe:
    """A recipe whose open fields are filled step by step.

    Attributes:
        recipe: The recipe so far. Fields that were given stay as they are.
        choices: The choices so far.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.choices: list[Choice] = []

    def is_open(self, *names: str) -> bool:
        """Return True if none of these fields is set."""
        return not any(self.recipe.is_set(name) for name in names)

    def choose(self, reason: str, **values: Any) -> None:
        """Set those of the fields that are open."""
        values = {name: value for name, value in values.items() if self.is_open(name)}
        if values:
            self.recipe = self.recipe.replace(is_checked=False, **values)
            self.choices.append(Choice(values, reason))


# Choices from text


def choose_from_text(recipe: OpenRecipe, profile: CorpusProfile) -> None:
    """Choose validation pairs, tokenizers, limits of length, and scores."""
    if recipe.is_open(*_VALIDATION):
        pairs = profile.pairs
        size = min(1000, max(pairs // 20, min(50, pairs // 5)))
        recipe.choose(f"no validation pairs are given, and there are {pairs:,} pairs", num_validation=size)
    source, target = profile.source, profile.target
    kinds = side_kind(source, target), side_kind(target, source)
    if recipe.is_open(*_TOKENIZER):
        is_joint = kinds[0] == kinds[1] != "word" and profile.shared_characters >= _SHARED_SCRIPT
        values: dict[str, Any] = {"tokenizer_kind": kinds[0], "joint_vocabulary": is_joint}
        if kinds[0] != kinds[1]:
            values["target_tokenizer_kind"] = kinds[1]
        if "byte_bpe" in kinds:
            values["vocab_size"] = vocabulary_size(profile)
        reason = f"sources are {_TEXT_NAMES[kinds[0]]}, targets {_TEXT_NAMES[kinds[1]]}"
        shared = f"{100 * profile.shared_characters:.0f} % of the targets' characters occur in the sources"
        recipe.choose(f"{reason}; {shared}", **values)
        limits = max_length(source, kinds[0]), max_length(target, kinds[1])
        recipe.choose("999 of 1,000 texts are shorter", max_source_length=limits[0], max_target_length=limits[1])
    scores = {"word": ["exact_match", "wer"], "char": ["exact_match", "cer"]}.get(
        kinds[1], ["bleu", "chrf", "exact_match"]
    )
    recipe.choose(f"targets are {_TEXT_NAMES[kinds[1]]}", metrics=scores)


def side_kind(side: SideProfile, other: SideProfile) -> str:
    """Return the kind of tokenizer for one side: `word` for symbols, `char` for single words, `byte_bpe` for text."""
    is_short = side.mean_characters <= _SHORT_TEXT
    is_built = other.new_words > _MANY_NEW_WORDS and len(side.alphabet & other.alphabet) > len(other.alphabet) / 2
    if is_short and (side.mean_words < 1.5 or (is_built and side.num_words > 2 * len(side.alphabet))):
        return "char"
    is_closed = side.new_words < _MAX_NEW_SYMBOLS and side.num_words <= _MAX_SYMBOLS
    return "word" if is_closed else "byte_bpe"


def vocabulary_size(profile: CorpusProfile) -> int:
    """Return the entries of a vocabulary of pieces: they grow with the square root of the text, from 1,000 to 32,000."""
    characters = profile.pairs * (profile.source.mean_characters + profile.target.mean_characters)
    return 500 * max(2, min(64, round(3 * math.sqrt(characters) / 500)))


def max_length(side: SideProfile, kind: str) -> int:
    """Return a limit in tokens that hardly any text exceeds, a multiple of 16 up to 1,024."""
    tokens = {"word": side.long_words, "char": side.long_characters, "byte_bpe": side.long_bytes / _BYTES_PER_PIECE}[
        kind
    ]
    return min(1024, 16 * math.ceil((1.2 * tokens + 8) / 16))


# Choices from tokens and from the speed of the machine


@dataclass(frozen=True)
class TokenProfile:
    """Tokens of an epoch: of all sources, all targets, and the longest pair."""

    pairs: int
    source: int
    target: int
    longest: int

    @property
    def both(self) -> int:
        """Tokens of both sides."""
        return self.source + self.target


@dataclass(frozen=True)
class Size:
    """A network: width, layers of each stack, and the target tokens up to which a larger one brought nothing."""

    width: int
    layers: int
    max_target_tokens: float

    @property
    def fields(self) -> dict[str, int]:
        """Return the fields of `MetaphraseConfig`."""
        fields = {
            "layers": self.layers,
            "ffn_dim": round(2.5 * self.width),
            "attention_heads": max(4, self.width // 64),
        }
        stacks = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in fields.items()}
        return {"hidden_size": self.width, **stacks}


def learning_rate(width: int) -> float:
    """Return the peak of the learning rate. At a width of 256, twice of it lost 3 to 24 points of exact match."""
    return round(2e-3 * (256 / width) ** 0.75, 5)


SIZES = (Size(128, 2, 60_000), Size(256, 3, 2_000_000), Size(384, 4, 10_000_000), Size(512, 6, math.inf))


def choose_from_tokens(
    recipe: OpenRecipe, tokens: TokenProfile, seconds_per_update: Callable[[Size], float], seconds: float | None
) -> None:
    """Choose network, batches, optimizer, length of the run, and evaluation.

    Args:
        recipe: The recipe, with the choices from text.
        tokens: Tokens of one epoch.
        seconds_per_update: Returns the time of an update with this budget, on this machine.
        seconds: Time for training; None if there is no limit.
    """
    budget = tokens_per_batch(tokens)
    if recipe.is_open("per_device_train_batch_size"):
        recipe.choose(f"an epoch has {tokens.both:,} tokens", max_tokens_per_batch=budget)
    wanted = useful_updates(tokens, budget)

    def possible(size: Size) -> float:
        return math.inf if seconds is None else seconds / seconds_per_update(size)

    size = choose_size(tokens, wanted, possible)
    updates = wanted
    if recipe.is_open("max_steps", "num_train_epochs"):
        share = min(1, possible(size) / wanted)
        reason = "more bring little" if share == 1 else f"about {100 * share:.0f} % of them fit into the time"
        recipe.choose(f"{updates * budget / tokens.both:.0f} epochs, {reason}", max_steps=updates)
    else:
        epochs = math.ceil(recipe.recipe.num_train_epochs * tokens.both / budget)
        updates = recipe.recipe.max_steps if recipe.recipe.max_steps > 0 else epochs
    if recipe.is_open("preset", "model"):
        model = {**size.fields, "dropout": dropout(updates * budget / tokens.both)}
        is_largest = tokens.target <= size.max_target_tokens
        reason = "more would not train it better" if is_largest else "the time allows no larger network"
        recipe.choose(f"{tokens.target:,} target tokens: {reason}", preset="metaphrase-tiny", model=model)
    if recipe.is_open("learning_rate", "lr_scheduler_type", "warmup_steps"):
        schedule = {
            "learning_rate": learning_rate(size.width),
            "lr_scheduler_type": "cosine",
            "warmup_steps": updates // 10,
        }
        recipe.choose("the best of three rates on most tasks", **schedule)
    recipe.choose(
        "usual for Transformers of this size",
        adam_beta2=0.98,
        weight_decay=0.01,
        label_smoothing_factor=0.1,
        max_grad_norm=1.0,
    )
    has_validation = any(getattr(recipe.recipe, name) for name in _VALIDATION)
    if has_validation and recipe.is_open(*_EVALUATION):
        steps = max(1, updates // _EVALUATIONS)
        every = {f"{event}_steps": steps for event in ("eval", "save")} | {"logging_steps": max(1, steps // 5)}
        best = {
            "load_best_model_at_end": True,
            "metric_for_best_model": recipe.recipe.metrics[0],
            "save_total_limit": 2,
        }
        decoded = max(50, min(500, _DECODED_TOKENS * tokens.pairs // tokens.target))
        strategies = {"eval_strategy": "steps", "save_strategy": "steps", "max_decoded_samples": decoded}
        recipe.choose(f"{_EVALUATIONS} times", **strategies, **every, **best, per_device_eval_batch_size=64)
    recipe.choose("beams gain 0 to 2 BLEU over greedy search", num_beams=4)


def tokens_per_batch(tokens: TokenProfile) -> int:
    """Return the budget of a batch: about 30 batches an epoch, within 1,024 and 4,096 tokens, or more for much text."""
    most = 4096 if tokens.both < 2e6 else 8192 if tokens.both < 2e7 else 16384
    return max(2 ** math.ceil(math.log2(tokens.longest)), min(most, max(1024, 2 ** round(math.log2(tokens.both / 30)))))


def useful_updates(tokens: TokenProfile, budget: int) -> int:
    """Return the updates after which little is gained: 1,400 for 1,000 short pairs, 5,000 for 100,000 sentences.

    Of much text, three epochs, and at most 100,000 updates.
    """
    return round(max(3000 * (tokens.both / 3e5) ** 0.25, min(100_000, 3 * tokens.both / budget)))


def choose_size(tokens: TokenProfile, updates: int, possible_updates: Callable[[Size], float]) -> Size:
    """Return the size that the target tokens can train; a smaller one if the time holds less than half of the updates."""
    largest = next(index for index, size in enumerate(SIZES) if tokens.target <= size.max_target_tokens)
    fitting = [size for size in SIZES[: largest + 1] if possible_updates(size) >= updates / 2]
    return fitting[-1] if fitting else SIZES[0]


def dropout(epochs: float) -> float:
    """Return the dropout: the more often a pair is seen, the higher."""
    return 0.3 if epochs > 30 else 0.2 if epochs > 12 else 0.1
