"""Scores of a corpus: BLEU, chrF, TER, ROUGE, exact match, WER and CER, with intervals by sacreBLEU."""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.significance import _bootstrap_resample

from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.storage.folders import file_in_one_step

DEFAULT_METRICS = ("bleu", "chrf")
NUM_BOOTSTRAP_SAMPLES = 1000
# sacreBLEU holds all resamples at once.
MAX_RESAMPLED_BYTES = 1_000_000_000
_LINES = 2000
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

# For each prediction a text, or several.
References = Sequence[str] | Sequence[Sequence[str]]


class Ratio:
    """Quotient of two sums over segments, with the methods of sacreBLEU's metrics that its tests call."""

    def __init__(self, factor: float = 100.0):
        self.factor = factor

    def _aggregate_and_compute(self, statistics: Sequence) -> Score:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def _compute_score_from_stats(self, sums: Sequence) -> Score:
        numerator, denominator = sums
        # TER has the same rule: with nothing to count, no edit is right, and any edit is wrong.
        return Score("ratio", float(self.factor * (numerator / denominator if denominator else min(numerator, 1))))

    def get_signature(self) -> Signature:
        """Return the signature that sacreBLEU adds the facts of a test to."""
        return Signature({"num_refs": 1})


@dataclass(frozen=True)
class SegmentStatistics:
    """Numbers of each segment whose sums give a corpus score, with its signature, and details for `metrics.json`.

    The scorer is a metric of sacreBLEU, or `Ratio`.
    """

    scorer: Any
    rows: Sequence[Sequence[float]]
    signature: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def score(self, indices: Iterable[int] | None = None) -> float:
        """Return the score of some segments, or of all."""
        rows = self.rows if indices is None else [self.rows[index] for index in indices]
        return float(self.scorer._aggregate_and_compute(rows).score)

    def summary(self, num_samples: int) -> dict[str, Any]:
        """Return the score with its details, and the interval if the resamples fit into memory, for JSON."""
        result = {"score": self.score(), **self.details, "signature": self.signature}
        num_values = num_samples * len(self.rows) * (len(self.rows[0]) + 2)
        has_interval = num_samples > 1 and 4 * num_values <= MAX_RESAMPLED_BYTES
        return result | (self.confidence(num_samples) if has_interval else {})

    def confidence(self, num_samples: int) -> dict[str, Any]:
        """Return the 95 % interval of a score, for JSON.

        `confidence_interval` has percentiles of the bootstrap. For a share of right answers it is Wilson's, since a corpus
        without mistakes has no other resample. `confidence_mean` and `confidence_var` are sacreBLEU's mean and half width.
        """
        seed, results = _bootstrap_resample(self.rows, self.scorer, num_samples)
        values = np.sort([result.score for result in results])
        low, high = interval = [float(values[num_samples // 40]), float(values[-1 - num_samples // 40])]
        fields = {"confidence_mean": float(values.mean()), "confidence_var": (high - low) / 2}
        if (matches := self.details.get("matches")) is not None:
            interval = _wilson_interval(matches, len(self.rows))
        return fields | {"confidence_interval": interval, "bs": num_samples, "seed": seed}


def _wilson_interval(matches: int, total: int) -> list[float]:
    """Return the 95 % interval of a share, in percent.

    Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.
    """
    share, z = matches / total, 1.959964
    center = share + z**2 / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return [100 * min(max(end / (1 + z**2 / total), 0.0), 1.0) for end in (center - half, center + half)]


_SACREBLEU_DETAILS = ("precisions", "counts", "totals", "bp", "sys_len", "ref_len", "num_edits", "ref_length")


def _sacrebleu(scorer_class: type, predictions: list[str], references: list[list[str]], **options) -> SegmentStatistics:
    """BLEU (Papineni et al. 2002), chrF (Popović 2015, 2017) or TER (Snover et al. 2006), with the options of its class."""
    if options.get("tokenize") == "none":
        # sacreBLEU warns about tokenized text, which is right here.
        options.setdefault("force", True)
    scorer = scorer_class(**options)
    # One document for each number of a reference. None fills up lines with fewer references.
    documents = [*zip_longest(*references)]
    rows, counts = [], set()
    # sacreBLEU keeps the n-grams of all references that it gets at a time.
    for start in range(0, len(predictions), _LINES):
        part = slice(start, start + _LINES)
        rows += scorer._extract_corpus_statistics(predictions[part], [document[part] for document in documents])
        counts.add(scorer.num_refs)
        # It warns of tokenized lines of the first part alone.
        scorer._force = True
    scorer.num_refs = counts.pop() if len(counts) == 1 else -1
    score = scorer._aggregate_and_compute(rows)
    details = {name: getattr(score, name) for name in _SACREBLEU_DETAILS if hasattr(score, name)}
    return SegmentStatistics(scorer, rows, str(scorer.get_signature()), details)


def _signature(references: list[list[str]], facts: str) -> str:
    counts = {len(texts) for texts in references}
    return f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}|{facts}"


def _rouge(
    predictions: list[str], references: list[list[str]], use_stemmer: bool = False, tokenize: str = "default"
) -> SegmentStatistics:
    """ROUGE F-measures by rouge_score, the mean over all lines; the score is ROUGE-L (Lin 2004).

    The best of several references counts, separately for each kind. `rougeLsum` needs newlines between the sentences of both
    columns; without them it equals `rougeL`. The default tokenizer keeps only a-z and 0-9, so that Greek or Chinese scores
    zero: `references_without_tokens` counts such lines. `tokenize="none"` splits at spaces instead and keeps case.
    """
    from rouge_score import rouge_scorer, tokenizers  # takes a second to import

    at_spaces = SimpleNamespace(tokenize=str.split)
    tokenizer = at_spaces if tokenize == "none" else tokenizers.DefaultTokenizer(use_stemmer)
    scorer = rouge_scorer.RougeScorer(ROUGE_KINDS, tokenizer=tokenizer)
    lines = [scorer.score_multi(texts, line) for line, texts in zip(predictions, references, strict=True)]
    details = {kind: 100 * float(np.mean([line[kind].fmeasure for line in lines])) for kind in ROUGE_KINDS}
    details["references_without_tokens"] = sum(not any(map(tokenizer.tokenize, texts)) for texts in references)
    facts = f"stem:{'yes' if use_stemmer else 'no'}|tok:{tokenize}|rouge_score:{version('rouge_score')}"
    rows = [(line["rougeL"].fmeasure, 1) for line in lines]
    return SegmentStatistics(Ratio(), rows, _signature(references, facts), details)


def _exact_match(predictions: list[str], references: list[list[str]], ignore_case: bool = False) -> SegmentStatistics:
    """Share of predictions that equal a reference."""
    fold = str.casefold if ignore_case else str
    pairs = zip(predictions, references, strict=True)
    rows = [(int(fold(prediction) in map(fold, texts)), 1) for prediction, texts in pairs]
    facts = f"case:{'ci' if ignore_case else 'mixed'}|punct:yes"
    details = {"matches": sum(match for match, _ in rows), "num_examples": len(rows)}
    return SegmentStatistics(Ratio(), rows, _signature(references, facts), details)


def _error_rate(
    unit: str, predictions: list[str], references: list[list[str]], lowercase: bool = False
) -> SegmentStatistics:
    """Edits of words, split at spaces, or of characters, in percent of the references. More than 100 is possible.

    The reference with the fewest edits counts, of equals the longest. `empty_references` counts references without a unit.
    """
    split = str.split if unit == "word" else list
    rows = []
    for prediction, texts in zip(predictions, references, strict=True):
        units, *candidates = (split(text.lower() if lowercase else text) for text in (prediction, *texts))
        counted = [(Levenshtein.distance(units, candidate), len(candidate)) for candidate in candidates]
        rows.append(min(counted, key=lambda row: (row[0], -row[1])))
    lengths = [length for _, length in rows]
    details = {"edits": sum(edits for edits, _ in rows), "ref_length": sum(lengths)}
    details["empty_references"] = lengths.count(0)
    facts = f"case:{'lc' if lowercase else 'mixed'}|unit:{unit}"
    return SegmentStatistics(Ratio(), rows, _signature(references, facts), details)


class Metric(NamedTuple):
    """A score: the function of its statistics, and the option that folds case."""

    statistics: Callable[..., SegmentStatistics]
    case_option: str | None = None

    def segments(self, predictions: Sequence[str], references: References, **options) -> SegmentStatistics:
        """Return the statistics of each line, for the score, intervals and tests."""
        lists = [[entry] if isinstance(entry, str) else list(entry) for entry in references]
        return self.statistics(list(predictions), lists, **options)


METRICS = {
    "bleu": Metric(partial(_sacrebleu, BLEU), "lowercase"),
    "chrf": Metric(partial(_sacrebleu, CHRF), "lowercase"),
    "chrf++": Metric(partial(_sacrebleu, CHRF, word_order=2), "lowercase"),
    "ter": Metric(partial(_sacrebleu, TER)),
    "rouge": Metric(_rouge),
    "exact_match": Metric(_exact_match, "ignore_case"),
    "wer": Metric(partial(_error_rate, "word"), "lowercase"),
    "cer": Metric(partial(_error_rate, "character"), "lowercase"),
}


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices, cutoff=0.4)
        raise MetaphraseError(f"{name} must be one of {', '.join(choices)}, got {value!r}.{hint}")


def metric_options(
    names: Sequence[str], bleu_tokenize: str | None = None, lowercase: bool = False
) -> dict[str, dict[str, Any]]:
    """Check names and tokenizer before any work, and return the options of each score for `compute_metrics`.

    A tokenizer of sacreBLEU is downloaded if need be. An option without effect is refused.
    """
    for name in names:
        _check_choice("A name in `metrics`", name, METRICS)
    options: dict[str, dict[str, Any]] = {}
    if bleu_tokenize is not None:
        if "bleu" not in names:
            raise MetaphraseError(f"`metrics` must hold bleu with `bleu_tokenize`, got {list(names)}.")
        _check_choice("`bleu_tokenize`", bleu_tokenize, BLEU.TOKENIZERS)
        try:
            BLEU(tokenize=bleu_tokenize)
        except (ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise MetaphraseError(f"`bleu_tokenize` must be installed, got {bleu_tokenize!r}: {reason}") from error
        options["bleu"] = {"tokenize": bleu_tokenize}
    if lowercase:
        case_options = {name: METRICS[name].case_option for name in names if METRICS[name].case_option}
        if not case_options:
            raise MetaphraseError(f"`lowercase` must come with a score that depends on case, got {list(names)}.")
        for name, option in case_options.items():
            options.setdefault(name, {})[option] = True
    return options


def compute_metrics(
    predictions: Sequence[str],
    references: References,
    names: Sequence[str] = DEFAULT_METRICS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    num_bootstrap_samples: int = 0,
) -> dict[str, dict[str, Any]]:
    """Return `{name: result}` for JSON.

    Args:
        references: One text, or a list of texts, for each example.
        names: Keys of `METRICS`.
        options: Keyword arguments of a score by its name: `{"bleu": {"tokenize": "none"}}`.
        num_bootstrap_samples: Resamples for the 95 % interval of each score, see `SegmentStatistics.confidence`. There is no
            interval for 0 resamples, or if they need more than `MAX_RESAMPLED_BYTES`.

    Raises:
        MetaphraseError: If a name is unknown, or the corpora are empty or differ in length.
    """
    metric_options(names)
    if not len(predictions) == len(references) > 0:
        raise MetaphraseError(
            "`predictions` and `references` must hold the same number of entries, at least one, "
            f"got {len(predictions)} and {len(references)}."
        )
    results = {}
    for name in names:
        segments = METRICS[name].segments(predictions, references, **(options or {}).get(name, {}))
        results[name] = segments.summary(num_bootstrap_samples)
    return results


def metrics_path(path: str | os.PathLike) -> Path:
    """Return the file of `write_metrics`: for a folder, or a path that ends in a slash, `metrics.json` in it."""
    is_folder = Path(path).is_dir() or os.fspath(path).endswith(("/", os.sep))
    return Path(path) / "metrics.json" if is_folder else Path(path)


def write_metrics(path: str | os.PathLike, metrics: Mapping[str, Any]) -> Path:
    """Write metrics as JSON by an atomic rename, and return the path (see `metrics_path`). All values must be finite."""
    path, text = metrics_path(path), json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_in_one_step(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path
