"""Rules that fill the open fields of a recipe, from tokens, from texts and from the speed of the machine, each with its reason.

Each rule takes a recipe and facts, and returns the recipe with the fields that it chose. docs/choices.md shows the measurements
on 17 tasks of 500 to 117,000 pairs that the rules follow from.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedConfig

from metaphrase.data.pairs import LENGTH_COLUMNS, SIDES
from metaphrase.tokenization.tokenizer_trainer import KINDS_THAT_FILL_A_VOCABULARY
from metaphrase.training.recipe.fields import DECODING, VALIDATION_FIELDS, decodes
from metaphrase.training.recipe.recipe import BATCH_SIZES, Recipe, choose_optimizer

# Its design is that of the networks which are chosen.
_PRESET = "metaphrase-tiny"
STRATEGIES = ("eval_strategy", "save_strategy")
_EVALUATIONS = 12
# Evaluations without a better score. The learning rate falls until the end, so that a score may rest in the middle of a run.
_PATIENCE = 6
# In target tokens. Few pairs take many updates to learn, and a small network makes more of them.
_FEW_TOKENS = 200_000
# Multiple of the usual updates that a run makes at most, if the time allows. On few sentences more updates helped.
_MOST_UPDATES = 2
_AVERAGED = 3
# In tokens: the batch of few pairs, and the smallest one that saves time. Smaller ones compute more slowly.
_SMALLEST_BATCH, QUICK_BATCH = 1024, 2048
# The smallest share of an update that an accelerator computes efficiently, in tokens. Not measured.
QUICK_SHARE = 8192
_MAX_RATE_FACTOR = 2.0
# Greedy tokens of one evaluation during training.
_DECODED_TOKENS = 10_000


def describe_choices(before: Recipe, after: Recipe) -> list[str]:
    """Return a line for each choice: the fields that `after` has beyond `before`, and the reason."""
    groups: list[list[str]] = []
    for name in after.set_names:
        if before.is_open(name) and name != "model":
            groups += [[]] if name in after.reasons or not groups else []
            groups[-1].append(name)
    return [
        f"{', '.join(_shown(before, after, name) for name in group)} ({after.reasons[group[0]]})" for group in groups
    ]


def _shown(before: Recipe, after: Recipe, name: str) -> str:
    value = getattr(after, name)
    if name == "preset":
        chosen = [f"{key} {size}" for key, size in after.model.items() if key not in before.model]
        value = f"{value} with {', '.join(chosen)}"
    if isinstance(value, dict):
        value = " ".join(f"{key} {share:g}" for key, share in value.items()) or "none"
    elif isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, float):
        value = f"{value:g}"
    return f"{name} {str(value).lower() if isinstance(value, bool) else value}"


# Profile of texts

# More pairs change the numbers little.
_SAMPLE_PAIRS = 50_000
# Words of a closed set are symbols, such as phonemes or commands: the next word of unseen text is hardly ever new.
_MAX_NEW_SYMBOLS, _MAX_SYMBOLS, _MARKS = 1e-3, 1000, ".,;?"


@dataclass(frozen=True)
class SideProfile:
    """Texts of one side. Words are split at white space.

    Attributes:
        repetitions: Mean number of times that a text occurs.
        alphabet: Different characters.
        num_letters: Number of different characters that Unicode has taken apart.
        num_words: Number of different words.
        new_words: Probability that the next word is new: the share of words that occurred once (Good 1953).
        has_marks: True if a word also occurs with a punctuation mark behind it, as in sentences.
    """

    repetitions: float
    mean_characters: float
    mean_words: float
    alphabet: frozenset[str]
    num_letters: int
    num_words: int
    new_words: float
    has_marks: bool = False

    @property
    def is_closed(self) -> bool:
        """True if the words are symbols of a closed set. Users of sentences write them in other ways, too."""
        return self.new_words < _MAX_NEW_SYMBOLS and self.num_words <= _MAX_SYMBOLS and not self.has_marks

    @classmethod
    def of(cls, texts: Sequence[str]) -> "SideProfile":
        words = [text.split() for text in texts]
        counts = Counter(chain.from_iterable(words))
        alphabet = frozenset().union(*texts)
        characters, lengths = [len(text) for text in texts], [len(line) for line in words]
        return cls(
            repetitions=len(texts) / len(set(texts)),
            mean_characters=float(np.mean(characters)),
            mean_words=float(np.mean(lengths)),
            alphabet=alphabet,
            num_letters=len(frozenset().union(*(unicodedata.normalize("NFD", letter) for letter in alphabet))),
            num_words=len(counts),
            new_words=sum(count == 1 for count in counts.values()) / max(1, counts.total()),
            has_marks=any(word[-1] in _MARKS and word.rstrip(_MARKS) in counts for word in counts),
        )


@dataclass(frozen=True)
class CorpusProfile:
    """Number of distinct training pairs, profiles of their sides, and the share of the targets' visible characters in sources."""

    pairs: int
    source: SideProfile
    target: SideProfile
    shared_characters: float

    @classmethod
    def of(cls, train: datasets.Dataset, scale: float = 1.0) -> "CorpusProfile":
        """Measure training pairs; of many pairs, those at regular distances. In all there are `scale` times as many."""
        sample = train.select(range(0, len(train), -(-len(train) // _SAMPLE_PAIRS)))[:]
        pairs = {*zip(*(sample[side] for side in SIDES), strict=True)}
        sources, targets = zip(*sorted(pairs), strict=True)
        source, target = SideProfile.of(sources), SideProfile.of(targets)
        counts = Counter("".join(chain.from_iterable(map(str.split, targets))))
        shared = sum(count for character, count in counts.items() if character in source.alphabet)
        num_pairs = int(scale * len(train)) * len(pairs) // len(sample["source"])
        return cls(num_pairs, source, target, shared / max(1, counts.total()))


# Choices from tokens and from the speed of the machine


@dataclass(frozen=True)
class TokenProfile:
    """Tokens of an epoch: of all sources, all targets, and the longest pair.

    Attributes:
        devices: Number of devices that share an epoch.
        smallest_share: Tokens of an update that each device has at least, if they do not exceed those of a single device.
    """

    pairs: int
    source: int
    target: int
    longest: int
    devices: int = 1
    smallest_share: int = QUICK_BATCH

    @classmethod
    def of(
        cls, encoded: Any, scale: float = 1.0, devices: int = 1, smallest_share: int = QUICK_BATCH
    ) -> "TokenProfile":
        """Count the tokens of encoded training pairs, of which there are `scale` times as many in all."""
        lengths = np.stack([np.asarray(encoded[side][:]) for side in LENGTH_COLUMNS], axis=1)
        pairs, source, target = (round(scale * size) for size in (len(lengths), *lengths.sum(axis=0).tolist()))
        return cls(pairs, source, target, int(lengths.sum(axis=1).max()), devices, smallest_share)

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

    def fields(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `MetaphraseConfig`, for the width that `model` gives, if it gives one."""
        width = model.get("hidden_size", self.width)
        # The configuration refuses a width that is none.
        width = width if isinstance(width, int) and width > 0 else self.width
        # Rotary positions take pairs of dimensions.
        heads = next((h for h in range(max(4, width // 64), 1, -1) if width % (2 * h) == 0), 1)
        fields = {"layers": self.layers, "ffn_dim": round(2.5 * width), "attention_heads": heads}
        stacks = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in fields.items()}
        return {"hidden_size": width, **stacks}


SIZES = (Size(128, 2, 60_000), Size(256, 3, 2_000_000), Size(384, 4, 10_000_000), Size(512, 6, math.inf))


@dataclass(frozen=True)
class StepCost:
    """Seconds of an optimizer step on this machine, 0 if unknown, and the batches that it is split into to fit into memory."""

    seconds: float
    batches: int = 1


def with_network(recipe: Recipe, reason: str, size: Size, **fields: Any) -> Recipe:
    """Return the recipe with a network, if its preset is open. Fields of the network that are given stay."""
    if not recipe.is_open("preset"):
        return recipe
    model = {**size.fields(recipe.model), **fields, **recipe.model}
    return recipe.choose(reason, preset=_PRESET).replace(model=model)


def choose_from_tokens(
    recipe: Recipe, tokens: TokenProfile, cost_of: Callable[[Size], StepCost], seconds: float | None
) -> tuple[Recipe, float]:
    """Choose network, batches, optimizer, length of the run, and evaluation, for the seconds of training, if they are limited.

    `cost_of` returns the cost of an optimizer step of a network on this machine. Return the recipe, and the seconds of all
    steps; 0 if the speed is unknown.
    """
    budget, factor = tokens_per_update(recipe, tokens), rate_factor(recipe, tokens)
    wanted = useful_updates(tokens, budget)
    # Without a limit, the speed need not be measured.
    size = choose_size(
        tokens, wanted, lambda size: math.inf if seconds is None else possible_updates(cost_of(size), seconds)
    )
    recipe, budget, cost = choose_batches(recipe, tokens, cost_of(size), wanted, seconds)
    in_time = possible_updates(cost, seconds)
    most = _MOST_UPDATES * wanted
    updates = wanted if in_time == math.inf else max(wanted, min(most, int(in_time)))
    ending = " fit into the time" if wanted < updates < most else ", after which little is gained"
    share = min(1, in_time / wanted)
    epochs = updates * budget / tokens.both
    recipe, updates = choose_updates(recipe, tokens, updates, epochs, ending, share, cost.seconds)
    # The time may end before the last update.
    reached = max(1, int(min(updates, in_time)))
    is_largest = tokens.target <= size.max_target_tokens
    reason = "no larger network learns more from" if is_largest else "the time allows no larger network for"
    rate = dropout(reached * budget / tokens.both, recipe.subword_sampling is not None)
    if "recombination" in recipe.augmentation and not recipe.r_drop_alpha:
        # No two epochs have the same pairs, and a long target has many places for an error.
        rate = 0.0
    recipe = with_network(recipe, f"{reason} {tokens.target:,} target tokens", size, dropout=rate)
    recipe = choose_optimizer(recipe, updates // 10, factor)
    return choose_evaluation(recipe, tokens, reached), updates * cost.seconds


def choose_updates(
    recipe: Recipe, tokens: TokenProfile, updates: int, epochs: float, ending: str, share: float, step_seconds: float
) -> tuple[Recipe, int]:
    """Choose the length of the run, unless it is given. `share` is the part that fits into the time, from 0 to 1."""
    if not recipe.is_open("max_steps", "num_train_epochs"):
        updates_of_epochs = math.ceil(recipe.num_train_epochs * tokens.both / tokens_per_update(recipe, tokens))
        return recipe, recipe.max_steps if recipe.max_steps > 0 else updates_of_epochs
    reason = f"{epochs:.0f} epochs{ending}" if epochs >= 1 else f"{100 * epochs:.0f} % of an epoch{ending}"
    if share < 1:
        shown = f"about {100 * share:.0f} %" if share > 0.01 else "less than 1 %"
        reason = f"{reason}; {shown} of them fit into the time, in which the learning rate falls to its end"
    elif step_seconds:
        seconds = updates * step_seconds
        shown = f"{seconds / 60:,.0f} minutes" if seconds < 5400 else f"{seconds / 3600:,.1f} hours"
        reason = f"{reason}; about {shown if seconds >= 90 else '1 minute'} on this machine"
    return recipe.choose(reason, max_steps=updates), updates


def possible_updates(cost: StepCost, seconds: float | None) -> float:
    """Return the updates that fit into some seconds; infinity without a limit or if the speed is unknown."""
    return math.inf if seconds is None or not cost.seconds else seconds / cost.seconds


def choose_batches(
    recipe: Recipe, tokens: TokenProfile, cost: StepCost, wanted: float, seconds: float | None
) -> tuple[Recipe, int, StepCost]:
    """Choose the tokens of an update, fewer if the time holds too few of the wanted updates.

    `cost` is that of an update of `tokens_per_update`. Return the recipe, the tokens of its updates, and their cost.
    """
    budget = tokens_per_update(recipe, tokens)
    if not recipe.is_open(*BATCH_SIZES):
        return recipe, budget, cost
    # A short run gains more by updates than by the tokens of each. With a reward, each source has several targets.
    quick = QUICK_BATCH if recipe.reward is None else QUICK_BATCH // 4
    smallest, reason = max(quick, _power_of_two(tokens.longest)), f"an epoch has {tokens.both:,} tokens"
    smallest *= tokens.devices
    while possible_updates(cost, seconds) < wanted and budget >= 2 * smallest:
        budget, cost = budget // 2, StepCost(cost.seconds / 2, max(1, cost.batches // 2))
    if budget < tokens_per_update(recipe, tokens):
        reason += ", and small batches make more updates in the time"
    fields = {"max_tokens_per_batch": tokens_of_batch(tokens, budget, cost.batches)}
    if cost.batches > 1:
        fields["gradient_accumulation_steps"] = cost.batches
        if recipe.is_open("gradient_accumulation_steps"):
            reason += ", and memory holds no more in one batch"
    return recipe.choose(reason, **fields), budget, cost


def choose_evaluation(recipe: Recipe, tokens: TokenProfile, updates: int) -> Recipe:
    """Choose when the model is evaluated and saved, which of its weights stay, and how it decodes."""
    if not any(getattr(recipe, name) for name in VALIDATION_FIELDS):
        return recipe.choose("there are no validation pairs to compare beams on", num_beams=4)
    strategy = recipe.eval_strategy if recipe.is_set("eval_strategy") else "steps"
    # With fields of saving, the user decides when to evaluate, and which weights stay.
    if recipe.is_open("save_strategy", "save_steps") and strategy != "no":
        usual = max(1, updates // _EVALUATIONS)
        chosen = dict.fromkeys(STRATEGIES, strategy)
        if strategy == "epoch":
            reason, num_evaluations = "evaluations by epoch", updates * tokens_per_update(recipe, tokens) / tokens.both
        else:
            steps = recipe.eval_steps or usual
            chosen |= {"eval_steps": steps, "save_steps": steps}
            # A value below 1 is a share of the run.
            num_evaluations = updates / steps if steps >= 1 else 1 / steps
            reason = f"{num_evaluations:.0f} evaluations in the run"
        if decodes(recipe):
            chosen["max_decoded_samples"] = max(50, min(1000, _DECODED_TOKENS * tokens.pairs // tokens.target))
        recipe = recipe.choose(reason, **chosen, logging_steps=max(1, usual // 5), per_device_eval_batch_size=64)
        recipe = choose_weights(recipe, num_evaluations)
    if recipe.is_open(*DECODING):
        recipe = recipe.choose("greedy search and beams are compared when training has ended", choose_decoding=True)
    return recipe


def choose_weights(recipe: Recipe, num_evaluations: float) -> Recipe:
    """Choose the weights of the best checkpoints, and an early end after half of the evaluations without a better score."""
    if recipe.is_set("average_last"):
        return recipe
    if "recombination" in recipe.augmentation and recipe.is_open("average_best", "save_total_limit", "lora_rank"):
        reason = "validation pairs are no deeper than those of training, so they cannot tell the last weights apart"
        return recipe.choose(reason, average_last=_AVERAGED, save_total_limit=_AVERAGED)
    # A reward is what the run trains for. An error rate tells weights apart that are exactly right equally often.
    metrics = recipe.metrics or ["bleu"] if decodes(recipe) else ["loss"]
    metric = next((name for name in (recipe.reward, "wer", "cer") if name in metrics), metrics[0])
    checkpoints = {"load_best_model_at_end": True}
    # A checkpoint of an adapter holds no weights to average.
    if recipe.is_open("load_best_model_at_end", "save_total_limit", "lora_rank"):
        checkpoints = {"average_best": _AVERAGED, "save_total_limit": _AVERAGED + 1}
    reason = "the mean of the best weights is rarely worse than the best"
    recipe = recipe.choose(reason, metric_for_best_model=metric, **checkpoints)
    patience = max(_PATIENCE, round(num_evaluations / 2))
    reason = f"a run ends if its score is no better for {patience} evaluations"
    return recipe.choose(reason, early_stopping_patience=patience)


def tokens_per_update(recipe: Recipe, tokens: TokenProfile) -> int:
    """Return the tokens of an update of all devices: those of the recipe's batches, or else of `tokens_per_batch`.

    Several devices share the batch of one, but each has at least one that it computes efficiently.
    """
    batches = recipe.gradient_accumulation_steps * tokens.devices
    if recipe.max_tokens_per_batch is not None:
        return recipe.max_tokens_per_batch * batches
    if recipe.is_set("per_device_train_batch_size"):
        return max(1, recipe.per_device_train_batch_size * batches * tokens.both // tokens.pairs)
    budget = tokens_per_batch(tokens)
    share = max(min(budget, tokens.smallest_share), budget // tokens.devices, _power_of_two(tokens.longest))
    return share * tokens.devices


def rate_factor(recipe: Recipe, tokens: TokenProfile) -> float:
    """Return the factor of the learning rate for an update of several devices: the root of its tokens, relative to one device."""
    alone = max(tokens_per_batch(tokens), tokens_per_update(recipe, replace(tokens, devices=1)))
    return min(_MAX_RATE_FACTOR, max(1.0, math.sqrt(tokens_per_update(recipe, tokens) / alone)))


def tokens_of_batch(tokens: TokenProfile, budget: int, batches: int) -> int:
    """Return the budget of one of the batches that each device has in an update, which holds the longest pair."""
    return max(_power_of_two(tokens.longest), budget // (batches * tokens.devices))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 2 ** math.ceil(math.log2(number))


def tokens_per_batch(tokens: TokenProfile) -> int:
    """Return the budget of an update: about 30 batches an epoch, within 1,024 and 4,096 tokens, or more for much text."""
    most = 4096 if tokens.both < 2e6 else 8192 if tokens.both < 2e7 else 16384
    return max(_power_of_two(tokens.longest), min(most, max(_SMALLEST_BATCH, 2 ** round(math.log2(tokens.both / 30)))))


def useful_updates(tokens: TokenProfile, budget: int) -> int:
    """Return the updates after which little is gained: 1,400 for 1,000 short pairs, 5,000 for 100,000 sentences.

    Of much text, three epochs, and at most 100,000 updates.
    """
    return round(max(3000 * (tokens.both / 3e5) ** 0.25, min(100_000, 3 * tokens.both / budget)))


def choose_size(tokens: TokenProfile, updates: int, possible_updates: Callable[[Size], float]) -> Size:
    """Return the size that the target tokens can train; a smaller one if the time holds too few of the updates.

    Few pairs need 55 % of the updates, and many pairs 40 %. docs/choices.md has the measurements.
    """
    least = 0.55 if tokens.target < _FEW_TOKENS else 0.4
    largest = next(index for index, size in enumerate(SIZES) if tokens.target <= size.max_target_tokens)
    fitting = [size for size in SIZES[: largest + 1] if possible_updates(size) >= least * updates]
    return fitting[-1] if fitting else SIZES[0]


def dropout(epochs: float, is_sampled: bool = False) -> float:
    """Return the dropout: the more often a pair is seen, the higher. Sampled segmentations take its place."""
    return 0.1 if is_sampled or epochs <= 12 else 0.2 if epochs <= 30 else 0.3


# Share of new words on a side whose words are built from words of the other side, as in inflection.
_MANY_NEW_WORDS = 0.2
# In characters. Entries of a dictionary are shorter.
_SHORT_TEXT = 30
# In words, as the mean of a side.
_SINGLE = 1.5
# Share of the targets' characters that the sources have too. Languages of one script share nearly all.
_SHARED_SCRIPT = 0.9
# A source that is so much longer than its target is summarized.
_SUMMARY_RATIO = 4
# In tokens. Attention takes time and memory with the square of the length.
_LONGEST = 1024
_TEXT_NAMES = {"word": "symbols", "char": "short strings", "byte_bpe": "text"}
# Shares of pairs that get a rare word, and that are made of parts of others.
_RARE_WORDS_SHARE = _RECOMBINED_SHARE = 0.3
# A text is a label if each occurs so often.
_LABEL_REPETITIONS = 20
# A script with more letters writes words by signs of their own, as Chinese does. Longer texts are sentences, not words.
_MANY_LETTERS, _LOGOGRAPHIC_SENTENCE = 500, 8
# Scripts with more characters between two spaces put none between words.
_LONG_WORD = 12
# From Thai on.
_EASTERN = "\u0e00"


def choose_from_text(recipe: Recipe, profile: CorpusProfile) -> Recipe:
    """Choose validation pairs, tokenizers and scores."""
    pairs, source, target = profile.pairs, profile.source, profile.target
    if recipe.is_open(*VALIDATION_FIELDS):
        size = min(1000, max(pairs // 20, min(50, pairs // 5)))
        recipe = recipe.choose(f"no validation pairs are given, and there are {pairs:,} pairs", num_validation=size)
    kinds = side_kind(source, target), side_kind(target, source)
    if kinds[0] == "word" and recipe.num_validation:
        recipe = recipe.choose("words that training does not show are unknown", keep_rare_words=True)
    if recipe.is_open("tokenizer_name_or_path", "model_name_or_path"):
        recipe = choose_tokenizers(recipe, profile, kinds)
    tokenize = bleu_tokenize(target)
    # ROUGE finds no words in text without spaces.
    is_summary = source.mean_characters > _SUMMARY_RATIO * target.mean_characters and tokenize is None
    if is_summary and kinds[1] == "byte_bpe":
        recipe = recipe.choose("sources are much longer than targets, as in summaries", metrics=["rouge", "chrf"])
    scores = {"word": ["exact_match", "wer"], "char": ["exact_match", "cer"]}
    metrics = scores.get(kinds[1], ["bleu", "chrf", "exact_match"])
    recipe = recipe.choose(f"targets are {_TEXT_NAMES[kinds[1]]}", metrics=metrics)
    if "bleu" in recipe.metrics and kinds[1] == "byte_bpe" and tokenize:
        recipe = recipe.choose("targets have no spaces between words", bleu_tokenize=tokenize)
    return recipe


def choose_augmentation(recipe: Recipe, learn_combinations: Callable[[], Any]) -> Recipe:
    """Choose rare words in the places of others, and pairs made of parts, if both sides consist of symbols and there are such."""
    kinds = {recipe.tokenizer_kind, recipe.target_tokenizer_kind or recipe.tokenizer_kind}
    if not recipe.is_open("augmentation", "rejected_column"):
        return recipe
    if kinds != {"word"}:
        return recipe.choose("pairs are recombined only if both sides are symbols", augmentation={})
    rare_words, recombination = learn_combinations()
    words = {word for substitutes in rare_words.substitutes.values() for word in substitutes}
    shares, reasons = {}, []
    if words:
        shares["rare_words"] = _RARE_WORDS_SHARE
        reasons.append(f"{len(words)} words are seen only in places where other words are seen, too")
    if recombination.num_additions or recombination.num_outer:
        shares["recombination"] = _RECOMBINED_SHARE
        reasons.append(
            f"{recombination.num_additions} additions to sources predict known targets, and {recombination.num_outer:,} "
            "pairs have another pair inside"
        )
        if recombination.has_places and recipe.is_open("preset", "model_name_or_path"):
            # Numbers in targets are places in sources, and rotary positions tell distances alone.
            recipe = recipe.replace(model={"position_embedding_type": "sinusoidal", **recipe.model})
    reason = "; ".join(reasons) or "no words and parts of pairs can take the places of others"
    return recipe.choose(reason, augmentation=shares)


def choose_limits(
    recipe: Recipe, lengths: Mapping[str, Sequence[int]], longest: tuple[int | None, int | None] = (None, None)
) -> Recipe:
    """Choose limits of length from the tokens of some texts of each side. The model reads the `longest`, if those have an end."""
    most_source, most_target = (min(_LONGEST, most or _LONGEST) for most in longest)
    # A fifth and 8 tokens more than nearly all texts have, rounded up to a multiple of 16.
    source, target = (16 * math.ceil((1.2 * np.quantile(lengths[side], 0.999) + 8) / 16) for side in SIDES)
    reason = "nearly all texts are shorter (99.9 %)"
    if source > most_source or target > most_target:
        is_usual = most_source == most_target == _LONGEST
        reason = "the longest that is usual" if is_usual else "the model reads no more"
    limits = {"max_source_length": min(most_source, source), "max_target_length": min(most_target, target)}
    recipe = recipe.choose(reason, **limits)
    if recipe.is_open("generation_max_length"):
        usual = math.ceil(np.quantile(lengths["source"], 0.999))
        reason = "nearly all sources have no more tokens (99.9 %); targets of longer ones may be longer in proportion"
        recipe = recipe.choose(reason, usual_source_length=usual)
    if source > most_source and target <= most_target:
        recipe = recipe.choose("some sources are longer, and their beginnings are read", too_long="truncate")
    return recipe


def choose_tokenizers(recipe: Recipe, profile: CorpusProfile, kinds: tuple[str, str]) -> Recipe:
    """Choose kinds of tokenizers, one vocabulary or two, and its size. `kinds` suit sources and targets."""
    source, target = profile.source, profile.target
    # The marks of terms are tokens of one vocabulary, and its pieces serve any text.
    must_join = bool(recipe.joint_vocabulary or "terms" in recipe.augmentation)
    reason = f"sources are {_TEXT_NAMES[kinds[0]]}, targets {_TEXT_NAMES[kinds[1]]}"
    if recipe.subword_sampling is not None:
        kinds, reason = ("byte_bpe", "byte_bpe"), "only pieces can be sampled"
    elif recipe.preset == "student-marian":
        kinds, reason = ("unigram", "unigram"), "Marian reads these pieces"
    elif must_join and kinds[0] != kinds[1]:
        kinds, reason = ("byte_bpe", "byte_bpe"), "both sides have one vocabulary"
    if recipe.tokenizer_kind is not None:
        kinds, reason = (recipe.tokenizer_kind, recipe.tokenizer_kind), "the kind is given"
    kind, target_kind = kinds[0], recipe.target_tokenizer_kind or kinds[1]
    values: dict[str, Any] = {"tokenizer_kind": kind}
    if kind == "word":
        reason += f"; words other than these {source.num_words:,} are unknown"
    if kind != target_kind:
        values["target_tokenizer_kind"] = target_kind
    can_join = kind == target_kind != "word" and recipe.is_open("target_tokenizer_kind", "target_vocab_size")
    values["joint_vocabulary"] = must_join or (can_join and profile.shared_characters >= _SHARED_SCRIPT)
    if {kind, target_kind} & {*KINDS_THAT_FILL_A_VOCABULARY}:
        # Entries grow with the square root of the text.
        characters = profile.pairs * (source.mean_characters + target.mean_characters)
        values["vocab_size"] = 500 * max(2, min(64, round(3 * math.sqrt(characters) / 500)))
    shared = f"{100 * profile.shared_characters:.0f} % of the targets' characters occur in the sources"
    recipe = recipe.choose(f"{reason}; {shared}", **values)
    # A character of Hangul stands for several letters. Targets must stay as they are: they are compared with the references.
    is_apart = all(unicodedata.is_normalized("NFD", letter) for letter in target.alphabet)
    if kind == "char" and 4 * source.num_letters <= len(source.alphabet) and is_apart:
        letters = f"the sources' {len(source.alphabet):,} characters consist of {source.num_letters} letters"
        recipe = recipe.choose(letters, normalization="nfd")
    return recipe


def side_kind(side: SideProfile, other: SideProfile) -> str:
    """Return the kind of tokenizer for one side: `word` for symbols, `char` for short strings, `byte_bpe` for text."""
    is_single, is_sentence = side.mean_words < _SINGLE, side.num_letters > _MANY_LETTERS
    if side.is_closed and is_single and side.repetitions >= _LABEL_REPETITIONS:
        return "word"
    if side.mean_characters <= (_LOGOGRAPHIC_SENTENCE if is_sentence else _SHORT_TEXT):
        is_built = other.mean_words < _SINGLE and other.new_words > _MANY_NEW_WORDS
        is_built = is_built and len(side.alphabet & other.alphabet) > len(other.alphabet) / 2
        if is_single or (is_built and side.num_words > 2 * len(side.alphabet)):
            return "char"
    return "word" if side.is_closed else "byte_bpe"


def bleu_tokenize(target: SideProfile) -> str | None:
    """Return sacreBLEU's tokenizer for text without spaces between words; None for its default."""
    # Code has long words too.
    num_eastern = sum(character >= _EASTERN for character in target.alphabet)
    if target.mean_characters <= _LONG_WORD * target.mean_words or 2 * num_eastern < len(target.alphabet):
        return None
    has_kana = any("\u3040" <= character <= "\u30ff" for character in target.alphabet)
    has_han = any("\u4e00" <= character <= "\u9fff" for character in target.alphabet)
    return "zh" if has_han and not has_kana else "char"


# Choices for fine-tuning. docs/choices.md lists the source of each rate, and a measurement with small bases.

_LORA_FACTOR, _MAX_LORA_RATE = 10, 1e-3
_MIN_UPDATES, _MAX_EPOCHS = 300, 30


@dataclass(frozen=True)
class FamilyRule:
    """Optimizer for one family of base models: the rate of AdamW for a hidden size of `width`, and the origin of the numbers."""

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


def choose_finetuning(
    recipe: Recipe,
    tokens: TokenProfile,
    config: PreTrainedConfig,
    num_beams: int,
    cost: StepCost,
    seconds: float | None,
    has_seen_pairs: bool = True,
) -> tuple[Recipe, float]:
    """Choose batches, optimizer, length of the run, and evaluation by the base model, its configuration and its beams.

    `cost` is that of an update. A base that has seen no pairs makes the updates of a new network. Return the recipe, and the
    seconds of all steps.
    """
    factor = rate_factor(recipe, tokens)
    alone = finetuning_updates(tokens, tokens_per_update(recipe, replace(tokens, devices=1)))
    wanted = (finetuning_updates if has_seen_pairs else useful_updates)(tokens, tokens_per_update(recipe, tokens))
    recipe, budget, cost = choose_batches(recipe, tokens, cost, wanted, seconds)
    if has_seen_pairs:
        # The same epochs in smaller batches, and few pairs as many updates as on one device.
        wanted = max(finetuning_updates(tokens, budget), min(_MIN_UPDATES, alone))
    share = min(1.0, possible_updates(cost, seconds) / wanted)
    ending = ": few pairs are repeated more often" if has_seen_pairs else ": the base has seen no pairs"
    updates, epochs = max(1, int(share * wanted)), wanted * budget / tokens.both
    recipe, updates = choose_updates(recipe, tokens, updates, epochs, ending, share, cost.seconds)
    family = family_of(config)
    rule = RULES.get(family, _BART)
    rate, source = rule.learning_rate(config.hidden_size), f"a {family} of width {config.hidden_size}: {rule.source}"
    if recipe.reward is not None or recipe.rejected_column is not None:
        rate, source = float(f"{rate / 10:.2g}"), f"a tenth of that for {source}"
    if factor != 1:
        rate, source = float(f"{factor * rate:.2g}"), f"{source}, times {factor:.2g} for {tokens.devices} devices"
    if recipe.lora_rank is not None:
        rate, source = min(_MAX_LORA_RATE, _LORA_FACTOR * rate), f"{source}, and {_LORA_FACTOR} times the rate for LoRA"
    recipe = recipe.choose(source, learning_rate=rate, lr_scheduler_type="cosine", warmup_steps=updates // 10)
    regularization = {"label_smoothing_factor": rule.label_smoothing, "weight_decay": rule.weight_decay}
    recipe = recipe.choose(f"usual for {family}", **regularization, adam_beta2=0.999, max_grad_norm=1.0)
    if num_beams > 1 and not recipe.choose_decoding:
        recipe = recipe.choose("the base model has them", num_beams=num_beams)
    return choose_evaluation(recipe, tokens, updates), updates * cost.seconds


def finetuning_updates(tokens: TokenProfile, budget: int) -> int:
    """Return the updates of 10 epochs of 1,000 pairs, falling to 3 epochs of 120,000; at least 300 within 30 epochs."""
    epochs = max(3, min(10, 10 * (1000 / tokens.pairs) ** 0.25))
    batches = tokens.both / budget
    return max(1, math.ceil(max(epochs * batches, min(_MIN_UPDATES, _MAX_EPOCHS * batches))))
