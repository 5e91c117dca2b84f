"""Plain text as training pairs, by span corruption (T5), text infilling (BART), a mixture (UL2) or prefixes (prefix LM)."""

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise, takewhile
from pathlib import Path

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from metaphrase.augmentation.augmentation import EpochPairs
from metaphrase.data.encoding import tokenizer_fingerprint
from metaphrase.data.pairs import LENGTH_COLUMNS, Policy, column_texts, read_cached
from metaphrase.errors import MetaphraseError
from metaphrase.tokenization import TokenizerPair, iterate_lines
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS
from metaphrase.training.corpora import PairCorpus

logger = logging.getLogger(__name__)

DEFAULT_SENTINELS = 100  # as T5
MASK_TOKEN = "<mask>"
SENTENCE_MARKS = (".", "!", "?", "…", "。", "！", "？", "．", "؟", "।")
CLOSING_MARKS = "\"'”’»)]}」』）"
# Names of the modes in the paper of UL2, and in the published models.
MODE_TOKENS = {"R": ("[R]", "[NLU]"), "S": ("[S]", "[S2S]"), "X": ("[X]", "[NLG]")}
# Mode, noise density, mean span length in tokens.
_UL2_SPANS = (("R", 0.15, 3.0), ("R", 0.15, 8.0), ("X", 0.5, 3.0), ("X", 0.5, 8.0), ("X", 0.15, 64.0), ("X", 0.5, 64.0))
_UL2_SUFFIX_FRACTION = 0.25
# A block has a token to keep and a token to hide.
_SHORTEST_BLOCK, _LONGEST_BLOCK = 2, 2**40


class Objective:
    """Function from a block of ids `(tokens,)` to source and target. Each has an end-of-sequence token."""

    def lengths(self, block_length: int) -> tuple[int, int]:
        """Return the most tokens of source and target of a block, with end-of-sequence tokens."""
        return block_length + 1, block_length + 1

    def num_sentinels(self, block_length: int) -> int:
        return 0


def sentinel_tokens(count: int) -> tuple[str, ...]:
    """Return `<extra_id_0>` to `<extra_id_{count - 1}>`, which replace removed spans.

    Source: span corruption, section 3.1.4 of Raffel et al. 2020 (arXiv 1910.10683).
    """
    return tuple(f"<extra_id_{index}>" for index in range(count))


@dataclass(frozen=True)
class SpanCorruption(Objective):
    """Objective that replaces spans of a block by sentinels. The target is each sentinel followed by its span.

    The block `Thank you for inviting me to your party last week` may become the source
    `Thank you <X> me to your party <Y>` and the target `<X> for inviting <Y> last week`.

    The length of a block decides how many tokens and spans are hidden. As in the paper's code, kept and hidden parts alternate
    and begin with a kept one, and no further sentinel ends the target. A single span therefore never moves.

    Source: Raffel et al. 2020, sections 3.1.4, 3.3.3 and 3.3.4 (arXiv 1910.10683).
    """

    sentinel_ids: Sequence[int]
    eos_token_id: int
    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def count_noise(self, block_length: int) -> tuple[int, int]:
        """Return the numbers of hidden tokens and of spans of a block."""
        num_noise = min(max(round(block_length * self.noise_density), 1), block_length - 1)
        num_spans = max(round(num_noise / self.mean_span_length), 1)
        # A kept token stands before each span. The paper's code breaks if there are too few.
        return num_noise, min(num_spans, block_length - num_noise)

    def lengths(self, block_length: int) -> tuple[int, int]:
        num_noise, num_spans = self.count_noise(block_length)
        return block_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    def num_sentinels(self, block_length: int) -> int:
        return self.count_noise(block_length)[1]

    def __call__(self, block: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        num_noise, num_spans = self.count_noise(len(block))
        hidden = random_segmentation(num_noise, num_spans, generator)
        ends = np.cumsum(random_segmentation(len(block) - num_noise, num_spans, generator) + hidden)
        return replace_spans(block, np.stack([ends - hidden, ends], axis=1), self.sentinel_ids, self.eos_token_id)


def random_segmentation(num_items: int, num_segments: int, generator: np.random.Generator) -> np.ndarray:
    """Return the lengths `(num_segments,)` of segments of at least one item. All ways to cut are equally likely."""
    cuts = np.sort(generator.choice(num_items - 1, size=num_segments - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=num_items)


def replace_spans(
    block: Sequence[int] | np.ndarray, spans: np.ndarray, sentinel_ids: Sequence[int], eos_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the block with each span `(spans, 2)` replaced by a sentinel, and the target: each sentinel followed by its span."""
    parts = np.split(np.asarray(block, dtype=np.int64), spans.ravel())
    marks = [[token] for token in (*sentinel_ids[: len(spans)], eos_token_id)]
    source = chain.from_iterable(zip(parts[::2], marks, strict=True))
    target = chain.from_iterable(zip(marks, [*parts[1::2], parts[0][:0]], strict=True))
    return np.concatenate([*source]), np.concatenate([*target])


@dataclass(frozen=True, kw_only=True)
class TextInfilling(Objective):
    """Objective that shuffles the sentences of a block and replaces spans of tokens by one mask each. The target is the block.

    Sentences, which end in `full_stop_ids`, are shuffled within their document. An end-of-sequence token inside the block ends
    a document.

    Span lengths follow a Poisson distribution. They are drawn until they reach the share of tokens to mask, and the last one
    is shortened to match it exactly. An empty span inserts a mask, unless there are more spans than masked tokens: a source is
    never longer than its block.

    Source: Lewis et al. 2020, section 2.2 for both kinds of noise, section 5.1 for the share (arXiv 1910.13461).
    """

    mask_token_id: int
    eos_token_id: int
    full_stop_ids: Sequence[int] = ()
    noise_density: float = 0.3
    mean_span_length: float = 3.0

    def __call__(self, block: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        block = np.asarray(block, dtype=np.int64)
        shuffled = self.permute_sentences(block, generator)
        # All positions of the spans are equally likely.
        lengths = self.span_lengths(len(block), generator)
        num_items = len(block) - int(lengths.sum()) + len(lengths)
        masks = np.sort(generator.choice(num_items, size=len(lengths), replace=False))
        # The last item is the end-of-sequence token.
        widths = np.ones(num_items + 1, dtype=np.int64)
        widths[masks] = lengths
        source = np.append(shuffled, self.eos_token_id)[np.cumsum(widths) - widths]
        source[masks] = self.mask_token_id
        return source, np.append(block, self.eos_token_id)

    def span_lengths(self, block_length: int, generator: np.random.Generator) -> np.ndarray:
        """Draw the lengths of the spans to mask, `(spans,)`, in random order."""
        budget = max(round(block_length * self.noise_density), 1)
        lengths = np.empty(0, dtype=np.int64)
        while lengths.sum() < budget:
            lengths = np.append(lengths, generator.poisson(self.mean_span_length, size=budget))
        totals = np.cumsum(lengths)
        lengths = np.diff(totals[totals < budget], prepend=0, append=budget)
        lengths = np.delete(lengths, np.flatnonzero(lengths == 0)[: max(len(lengths) - budget, 0)])
        # Otherwise the shortened span would always be the last of the text.
        return generator.permutation(lengths)

    def permute_sentences(self, block: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Put the sentences of each document into a random order. All orders are equally likely."""
        shuffled, is_full_stop = block.copy(), np.isin(block, self.full_stop_ids)
        bounds = [-1, *np.flatnonzero(block == self.eos_token_id), len(block)]
        for before, behind in pairwise(bounds):
            document, stops = block[before + 1 : behind], is_full_stop[before + 1 : behind]
            # A sentence ends behind a run of full stops.
            sentences = np.split(document, np.flatnonzero(stops[:-1] & ~stops[1:]) + 1)
            order = generator.permutation(len(sentences))
            shuffled[before + 1 : behind] = np.concatenate([sentences[index] for index in order])
        return shuffled


class MixtureOfDenoisers(Objective):
    """Objective of UL2, which draws one of seven denoisers for each block, all equally often.

    Six are span corruptions, with regular (R) or extreme (X) noise. The sequential one (S) splits a block: the source is its
    beginning, the target is the rest. The paper gives only the mean length of that target. Here all lengths from one token to
    twice the mean less one are equally likely. The paper leaves the distribution of span lengths open; its code draws spans as
    T5, and so does this class.

    Source: Tay et al. 2022, section 3.1.2 with its table of settings, and 3.1.3 for the modes (arXiv 2205.05131).
    """

    def __init__(self, sentinel_ids: Sequence[int], eos_token_id: int, mode_token_ids: Mapping[str, int]):
        """Take the token before the source by mode, if there is any. The first sentinel also replaces the rest of a block."""
        self.sentinel_ids, self.eos_token_id, self.mode_token_ids = sentinel_ids, eos_token_id, mode_token_ids
        self.spans = [(mode, SpanCorruption(sentinel_ids, eos_token_id, *noise)) for mode, *noise in _UL2_SPANS]

    def longest_suffix(self, block_length: int) -> int:
        mean = max(round(block_length * _UL2_SUFFIX_FRACTION), 1)
        return min(2 * mean - 1, block_length - 1)

    def lengths(self, block_length: int) -> tuple[int, int]:
        suffix = block_length + 1, self.longest_suffix(block_length) + 2
        source, target = map(max, suffix, *(spans.lengths(block_length) for _, spans in self.spans))
        return source + bool(self.mode_token_ids), target

    def num_sentinels(self, block_length: int) -> int:
        return max(spans.num_sentinels(block_length) for _, spans in self.spans)

    def __call__(self, block: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.spans) + 1
        # Without `p`, NumPy would draw other numbers.
        number = int(generator.choice(count, p=np.ones(count) / count))
        if number < len(self.spans):
            mode, spans = self.spans[number]
            source, target = spans(block, generator)
        else:
            mode, end = "S", len(block)
            start = end - int(generator.integers(1, self.longest_suffix(end), endpoint=True))
            source, target = replace_spans(block, np.array([[start, end]]), self.sentinel_ids, self.eos_token_id)
        return np.insert(source, 0, self.mode_token_ids[mode]) if self.mode_token_ids else source, target


@dataclass(frozen=True)
class PrefixLM(Objective):
    """Objective that splits a block: the source is its beginning, the target is the rest. All splits are equally likely.

    It needs no tokens of its own, so that an adapted decoder-only model keeps its vocabulary.

    Source: Raffel et al. 2020, section 3.3.1 (arXiv 1910.10683); Zhang et al. 2025, section 3 (arXiv 2504.06225).
    """

    eos_token_id: int

    def lengths(self, block_length: int) -> tuple[int, int]:
        return block_length, block_length

    def __call__(self, block: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        parts = np.split(np.asarray(block, dtype=np.int64), [generator.integers(1, len(block))])
        return tuple(np.append(part, self.eos_token_id) for part in parts)


def objective_tokens(name: str, num_sentinels: int = DEFAULT_SENTINELS) -> tuple[str, ...]:
    """Return the special tokens that an objective of `make_objective` adds to a tokenizer."""
    if name in ("text_infilling", "prefix_lm"):
        return (MASK_TOKEN,) if name == "text_infilling" else ()
    return (*(names[0] for names in MODE_TOKENS.values() if name == "ul2"), *sentinel_tokens(num_sentinels))


def make_objective(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    noise_density: float | None = None,
    mean_span_length: float | None = None,
) -> Objective:
    """Make an objective: `span_corruption` (T5), `ul2`, `prefix_lm`, or `text_infilling` with sentence permutation (BART).

    The tokenizer has the tokens of `objective_tokens(name)`, as those of published T5 and BART. None is the value of the paper.
    """
    options = {"noise_density": noise_density, "mean_span_length": mean_span_length}
    options = {option: value for option, value in options.items() if value is not None}
    eos, vocabulary = tokenizer.eos_token_id, tokenizer.get_vocab()
    if name == "prefix_lm":
        return PrefixLM(eos)
    is_infilling = name == "text_infilling"
    names = (tokenizer.mask_token or MASK_TOKEN,) if is_infilling else sentinel_tokens(len(vocabulary))
    noise_ids = tuple(map(vocabulary.get, takewhile(vocabulary.__contains__, names)))
    if not noise_ids:
        tokens = MASK_TOKEN if is_infilling else "<extra_id_0> and further ones"
        raise MetaphraseError(f"A tokenizer must have {tokens} for `objective` {name}, got none.")
    if is_infilling:
        # Tokens that end in a mark, with closing quotes and brackets behind it. Abbreviations and ordinals look like these.
        ids = sorted(set(vocabulary.values()) - set(tokenizer.all_special_ids))
        texts = (tokenizer.decode([token]).rstrip(CLOSING_MARKS + " ") for token in ids)
        full_stops = tuple(token for token, text in zip(ids, texts, strict=True) if text.endswith(SENTENCE_MARKS))
        return TextInfilling(mask_token_id=noise_ids[0], eos_token_id=eos, full_stop_ids=full_stops, **options)
    if name == "span_corruption":
        return SpanCorruption(sentinel_ids=noise_ids, eos_token_id=eos, **options)
    modes = {mode: vocabulary[token] for mode, tokens in MODE_TOKENS.items() for token in tokens if token in vocabulary}
    return MixtureOfDenoisers(noise_ids, eos, modes)


class DenoisingDataset(EpochPairs):
    """Blocks of plain text as pairs. `dataset[index]` is a block with the noise of the present epoch.

    The noise of a block depends on seed, epoch and index alone, so it is equal in all orders, batches, workers and processes.

    `dataset["source_length"]`, `dataset["target_length"]` and their sum `dataset["length"]` are lengths in tokens, equal in all
    epochs. The blocks have the column `input_ids` and one length.
    """

    def __init__(self, blocks: datasets.Dataset, objective: Objective, seed: int = 0):
        super().__init__()
        self.blocks = blocks.select_columns("input_ids").with_format("numpy")
        self.objective, self.seed = objective, seed
        self.column_names = ["input_ids", "labels", *LENGTH_COLUMNS, "length"]
        block_length = len(self.blocks[0]["input_ids"])
        sides = objective.lengths(block_length)
        self._lengths = dict(zip(self.column_names[2:], (*sides, sum(sides)), strict=True))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, key: int | str) -> dict[str, list[int]] | list[int]:
        if isinstance(key, str):
            return [self._lengths[key]] * len(self)
        index = range(len(self))[key]
        generator = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.epoch, index)))
        source, target = self.objective(self.blocks[index]["input_ids"], generator)
        return {"input_ids": source.tolist(), "labels": target.tolist()}


def longest_block(objective: Objective, max_source_length: int, max_target_length: int | None = None) -> int:
    """Return the length of the longest block whose pair is always within the limits, end-of-sequence tokens counted.

    With `SpanCorruption` and no target limit the source has exactly `max_source_length` tokens. It grows by at most one token
    with each token of the block.

    Source: `random_spans_helper` of T5's code, for span corruption (Raffel et al. 2020, arXiv 1910.10683).
    """

    def is_too_long(block_length: int) -> bool:
        source, target = objective.lengths(block_length)
        return source > max_source_length or target > (max_target_length or math.inf)

    longest = bisect_left(range(_LONGEST_BLOCK), True, lo=_SHORTEST_BLOCK, key=is_too_long) - 1
    if longest < _SHORTEST_BLOCK:
        raise MetaphraseError(
            f"`max_source_length` and `max_target_length` must hold the pair of a block of {_SHORTEST_BLOCK} tokens, "
            f"{objective.lengths(_SHORTEST_BLOCK)}, got {max_source_length} and {max_target_length}."
        )
    needed, present = objective.num_sentinels(longest), len(getattr(objective, "sentinel_ids", ()))
    if needed > present:
        raise MetaphraseError(f"`num_sentinels` must be at least {needed} for {longest} tokens, got {present}.")
    return longest


TEXTS_PER_CALL = 1000
# Part of every cache key. Raise it when the same texts would be cut into other blocks.
CACHE_VERSION = 7


@dataclass
class BlockReport:
    """Counts of all documents, of unused ones, of blocks, of unused tokens behind the last block, and of all tokens."""

    documents: int
    empty_documents: int
    invalid_documents: int
    block_length: int
    blocks: int
    remainder_tokens: int
    tokens: int
    to_dict = asdict

    def __str__(self) -> str:
        unused = f"not used: {self.empty_documents} empty, {self.invalid_documents} not UTF-8"
        blocks = f"{self.blocks} blocks of {self.block_length}, and {self.remainder_tokens} not used"
        return f"{self.documents} documents, {unused}; {self.tokens} tokens in {blocks}."


def load_texts(
    file: str | Path,
    max_samples: int | None = None,
    invalid_utf8: Policy = "error",
    max_line_characters: int = MAX_LINE_CHARACTERS,
) -> datasets.Dataset:
    """Read a UTF-8 text file with one document per line, compressed (`.gz`) or not, into the column `text`.

    With `invalid_utf8="skip"`, a line that is not UTF-8 becomes None, which `text_blocks` counts. A changed file is read again.
    """
    options = max_line_characters, invalid_utf8 == "skip"
    lines, features = iterate_lines(file, *options), datasets.Features({"text": datasets.Value("string")})
    texts = read_cached(lambda: zip(lines), features, (options, CACHE_VERSION), (str(file),))
    if not len(texts):
        raise MetaphraseError(f"A text file must hold at least one line, got none in {file}.")
    return texts if max_samples is None else texts.select(range(min(max_samples, len(texts))))


def text_blocks(
    texts: datasets.Dataset, tokenizers: TokenizerPair, block_length: int
) -> tuple[datasets.Dataset, BlockReport]:
    """Join all documents in order, each with its end-of-sequence token, and cut them into blocks.

    The result is cached on disk by data set, tokenizer and length. One process cuts, because each block begins where the last
    one ended. Tokens behind the last block are not used, and counted.
    """
    if not tokenizers.is_joint:
        raise MetaphraseError("`tokenizers` must be joint, because a block goes to both sides, got two tokenizers.")

    def cut() -> Iterator[tuple[np.ndarray]]:
        rest, num_empty, num_invalid = [], 0, 0
        for batch in texts.iter(TEXTS_PER_CALL):
            valid = [text for text in batch["text"] if text is not None]
            encoded = zip(valid, tokenizers.encode_sources(valid), strict=True)
            # An empty document has the end-of-sequence token alone.
            documents = [ids for text, ids in encoded if text.strip() and len(ids) > 1]
            num_empty += len(valid) - len(documents)
            num_invalid += len(batch["text"]) - len(valid)
            rest.extend(chain.from_iterable(documents))
            stop = len(rest) - len(rest) % block_length
            yield from zip(np.array(rest[:stop], dtype=np.int32).reshape(-1, block_length), strict=True)
            del rest[:stop]
        # The last row holds the counts and the rest, so that a cached run has them too.
        yield (np.array([num_empty, num_invalid, *rest], dtype=np.int32),)

    key = texts._fingerprint, tokenizer_fingerprint(tokenizers), block_length, CACHE_VERSION
    rows = read_cached(cut, datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}), key, ())
    blocks = rows.select(range(len(rows) - 1))
    num_empty, num_invalid, *rest = rows[-1]["input_ids"]
    num_tokens = len(blocks) * block_length + len(rest)
    report = BlockReport(len(texts), num_empty, num_invalid, block_length, len(blocks), len(rest), num_tokens)
    if not report.blocks:
        raise MetaphraseError(f"The texts must fill at least one block of {block_length} tokens. {report}")
    return blocks, report


class TextCorpus(PairCorpus):
    """Plain text, from which a denoising objective makes pairs: the corrupted text and its hidden spans."""

    def _check(self) -> None:
        self.recipe.data_path("train_text_file")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return objective_tokens(self.recipe.objective, self.recipe.num_sentinels)

    def load(self) -> None:
        for split in ("train", "validation"):
            if getattr(self.recipe, f"{split}_text_file") is not None:
                limits = getattr(self.recipe, f"max_{split}_samples"), self.recipe.invalid_utf8
                path = self.recipe.data_path(f"{split}_text_file")
                self.splits[split] = load_texts(path, *limits, self.recipe.max_line_characters)

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        # A line that is not UTF-8 is None.
        return filter(None, column_texts(self.splits["train"], "text")), ()

    def _encode(self, split: str, tokenizers: TokenizerPair) -> DenoisingDataset:
        recipe = self.recipe
        objective = make_objective(recipe.objective, tokenizers.source, recipe.noise_density, recipe.mean_span_length)
        length = longest_block(objective, recipe.max_source_length, recipe.max_target_length)
        blocks, self.reports[split] = text_blocks(self.splits[split], tokenizers, length)
        logger.info("%s: %s", split, self.reports[split])
        return DenoisingDataset(blocks, objective, self.seed)

    def scored_split(self) -> None:
        return None

    def sizes(self) -> dict[str, int]:
        return {f"num_{name}_documents": len(split) for name, split in self.splits.items()}
