"""Plain text of the target language as training pairs: a reverse model writes the sources.

Source: Sennrich et al. 2016, Improving Neural Machine Translation Models with Monolingual Data, https://aclanthology.org/P16-1009.
The tag of synthetic sources: Caswell et al. 2019, Tagged Back-Translation, https://aclanthology.org/W19-5206.
"""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from metaphrase.data.pairs import SIDES, SPLITS, DataReport, PairSource, column_texts, data_seed
from metaphrase.errors import MetaphraseError
from metaphrase.filtering.rules import FilterSettings, PairRules, normal_form, split_words
from metaphrase.filtering.run import pair_formatter
from metaphrase.inference import Generator
from metaphrase.inference.batches import longest_source
from metaphrase.inference.line_files import OutputFile
from metaphrase.inference.progress import ProgressBar, progress_bar
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.texts import count_lines, iterate_lines, read_lines
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

TAG = "<BT>"
TEXT_NAME, MIXTURE_NAME = "target.txt", "mixture.jsonl"
_as_json = pair_formatter(MIXTURE_NAME)
# Lines that are drawn for each pair, and in all at least and at most. They are in memory.
_LINES_PER_PAIR, _LEAST_LINES, _MOST_LINES = 20, 200_000, 5_000_000
# Lines of a chunk, after which the time is looked at.
_CHUNK = 1024
# Times that a pair is repeated among more synthetic pairs.
_MOST_REPEATED = 3
# Rules of `metaphrase filter` that synthetic pairs may break. The others look for faults of texts that people wrote.
_RULES = ("empty", "script", "length_ratio", "repetition")
# Pairs from which rules and words are learned.
_SAMPLE = 100_000
# Mean log odds of the words of a line, below which it is in the language of the sources.
_FOREIGN = -1.0


def write_data(corpus: PairCorpus, folder: Path) -> dict[str, Any]:
    """Write the pairs of all splits, so that all stages have the same, and a sample of `monolingual_target`.

    The corpus was read, with the splits of the run. Return the numbers of pairs and lines, and the special tokens of the pairs.
    """
    recipe, sizes, scored, held_out, longest = corpus.recipe, Counter(), set(), set(), 0
    for split in (split for split in reversed(SPLITS) if split in corpus.splits):
        total, is_train = len(corpus.splits[split]), split == "train"
        pairs = zip(*(column_texts(corpus.splits[split], side) for side in SIDES), strict=True)
        if is_train and corpus.stream is not None:
            # The splits hold a sample alone.
            total = corpus.num_pairs
            pairs = (pair for pair in corpus.stream.pairs(DataReport()) if pair[0].strip() not in held_out)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file, _bar(recipe, total, "pair") as bar:
            for source, target in pairs:
                bar.update(1)
                sizes[split] += 1
                file.write(_as_json(source, target))
                if is_train:
                    longest = max(longest, len(target))
                else:
                    held_out.add(source.strip())
                    scored.add(normal_form(target))
    most = min(_MOST_LINES, max(_LEAST_LINES, _LINES_PER_PAIR * sizes["train"]))
    lines, counts = sample_lines(recipe, scored, word_odds(folder / "train.jsonl"), most, longest)
    (folder / TEXT_NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {"pairs": dict(sizes), "lines": counts, "special_tokens": recipe.additional_special_tokens or []}


def _bar(recipe: Recipe, total: int | None, unit: str) -> ProgressBar:
    return progress_bar(total, unit, not recipe.disable_tqdm)


def word_odds(path: Path) -> Callable[[str], float]:
    """Return a function from a text to the mean log odds of its words, which is positive in the language of the targets."""
    counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for pair in islice(PairSource(file=path).pairs(), _SAMPLE):
        for side, text in zip(counts, pair, strict=True):
            side.update(split_words(text))
    source, target = counts
    constant = math.log((1 + source.total()) / (1 + target.total()))
    odds = {word: math.log((1 + target[word]) / (1 + source[word])) + constant for word in source | target}

    def mean_odds(text: str) -> float:
        known = [odds[word] for word in split_words(text) if word in odds]
        return sum(known) / max(1, len(known))

    return mean_odds


def sample_lines(
    recipe: Recipe, scored: set[str], odds: Callable[[str], float], most: int, longest: int
) -> tuple[list[str], dict[str, int]]:
    """Draw lines of `monolingual_target` in random order, and count those that are left out by the reason.

    Args:
        scored: Normal forms of validation and test targets, which must not be learned.
        odds: Log odds of a text, positive in the language of the targets.
        most: Maximum number of lines.
        longest: Characters of the longest target. The reverse model reads no lines of twice as many.

    Source of the sample: Vitter 1985, algorithm R.
    """
    path, counts, draw = recipe.data_path("monolingual_target"), Counter(), random.Random(data_seed(recipe))
    lines: list[str] = []
    hashes: set[int] = set()
    with _bar(recipe, count_lines(path), "line") as bar:
        for line in read_lines(path, recipe.max_line_characters):
            bar.update(1)
            text = line.text.strip()
            form = normal_form(text)
            reason = line.kind or ("" if form else "blank")
            if not reason and form in scored:
                reason = "target of validation or test"
            elif not reason and hash(form) in hashes:
                reason = "repeated"
            elif not reason and len(text) > 2 * longest:
                reason = "twice as long as all targets"
            elif not reason and odds(text) < _FOREIGN:
                reason = "other language"
            counts[reason or "kept"] += 1
            if reason:
                continue
            hashes.add(hash(form))
            if len(lines) < most:
                lines.append(text)
            elif (index := int(draw.random() * counts["kept"])) < most:
                lines[index] = text
    shown = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    if not lines:
        raise MetaphraseError(f"`monolingual_target` must hold the target language, got {path}: {shown or 'nothing'}.")
    draw.shuffle(lines)
    logger.info("%s: %s; %d are drawn.", path, shown, len(lines))
    return lines, dict(counts)


def write_sources(folder: Path, stage: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Write a synthetic source for as many lines of the plain text as the time holds. A stopped file is continued.

    The folder of the stages has the plain text and the model `reverse`. The stage names the file; the options are of the search.
    """
    generator, deadline = Generator.from_pretrained(folder / "reverse"), time.time() + seconds
    # Other characters than those of the pairs may be many tokens.
    generator.max_source_length = longest_source(generator.model)
    lines = [*iterate_lines(folder / TEXT_NAME)]
    with OutputFile(folder / f"{stage}.jsonl", resume=True, chunk_size=_CHUNK) as file:
        first = file.next_source
        results = generator.generate_stream(
            lines[first:],
            chunk_size=_CHUNK,
            first_chunk=first // _CHUNK,
            total=len(lines),
            show_progress=True,
            **{"num_beams": 1, **options},
        )
        for target, [candidate] in zip(lines[first:], results, strict=True):
            if file.next_source % _CHUNK == 0 and file.next_source > first and time.time() > deadline:
                break
            file.write(_as_json(candidate.text, target))
        file.finish()
        return {"lines": file.next_source, **write_mixture(folder, stage)}


def write_mixture(folder: Path, stage: str) -> dict[str, Any]:
    """Write the synthetic pairs of a stage that break no rule, and all pairs, several times if they are fewer."""
    pairs, counts = PairSource(file=folder / "train.jsonl"), Counter()
    rules = PairRules(FilterSettings(rules=_RULES), [*islice(pairs.pairs(), _SAMPLE)])
    with (
        file_in_one_step(folder / MIXTURE_NAME) as path,
        path.open("w", encoding="utf-8") as file,
        progress_bar(count_lines(folder / f"{stage}.jsonl"), "pair", True) as bar,
    ):
        for source, target in PairSource(file=folder / f"{stage}.jsonl").pairs():
            bar.update(1)
            rule, _ = rules.broken_rule(source, target)
            counts[rule or "kept"] += 1
            if not rule:
                file.write(_as_json(f"{TAG} {source}", target))
        num_pairs = sum(1 for _ in pairs.pairs())
        times = max(1, min(_MOST_REPEATED, round(counts["kept"] / num_pairs)))
        for pair in chain.from_iterable(pairs.pairs() for _ in range(times)):
            file.write(_as_json(*pair))
    shown = ", ".join(f"{count:,} {rule}" for rule, count in counts.most_common())
    logger.info("Synthetic pairs of %s: %s. Each of the %d pairs comes %d times.", stage, shown, num_pairs, times)
    return {"synthetic": dict(counts), "times": times}
