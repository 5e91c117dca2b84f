"""Scores of a corpus, as classes of `evaluate`: BLEU, chrF, TER, ROUGE, exact match, WER and CER. Tests of significance."""

import inspect
import json
import os
import tempfile
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import evaluate
import numpy as np
from datasets import Features, List, Value
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.significance import PairedTest, Result

from metaphrase.storage.folders import file_in_one_step
from metaphrase.storage.hints import did_you_mean

NUM_BOOTSTRAP_SAMPLES, NUM_RANDOMIZATION_TRIALS = 1000, 10_000
# sacreBLEU holds all resamples at once. The first limit is that of an interval beside a score, the second that of a test.
MAX_RESAMPLED_BYTES, MAX_TEST_BYTES = 1_000_000_000, 8_000_000_000


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


class _Known:
    """Metric of sacreBLEU that takes statistics in place of outputs. So no test computes them again."""

    def __init__(self, scorer: Any):
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def _extract_corpus_statistics(self, statistics: np.ndarray, references: None) -> np.ndarray:
        return statistics


@dataclass(frozen=True)
class SegmentStatistics:
    """Numbers of each segment whose sums give a corpus score.

    Attributes:
        scorer: A metric of sacreBLEU, or `Ratio`.
        rows: A row of numbers for each segment.
        signature: The signature of the score.
    """

    scorer: Any
    rows: Sequence[Sequence[float]]
    signature: str

    def score(self, indices: Iterable[int]) -> float:
        """Return the score of some segments."""
        return float(self.scorer._aggregate_and_compute([self.rows[index] for index in indices]).score)

    def interval(self, num_samples: int = NUM_BOOTSTRAP_SAMPLES) -> dict[str, Any]:
        """Return the 95 % interval under sacreBLEU's names; empty if it would need more than `MAX_RESAMPLED_BYTES`.

        `confidence_mean` is the mean over the resamples, and `confidence_var` half of the width of the interval.
        """
        num_values = num_samples * len(self.rows) * (len(self.rows[0]) + 2)
        if num_samples < 2 or 4 * num_values > MAX_RESAMPLED_BYTES:
            return {}
        [result], seed = paired_test({"": self}, "bs", num_samples)
        facts = {"confidence_mean": float(result.mean), "confidence_var": float(result.ci)}
        return facts | {"bs": num_samples, "seed": seed}


def paired_test(
    systems: Mapping[str, SegmentStatistics], kind: Literal["bs", "ar"], num_samples: int
) -> tuple[list[Result], str]:
    """Test each system against the first one.

    Args:
        systems: Statistics of one score by the name of the system.
        kind: `bs` for the paired bootstrap, which also gives intervals; `ar` for approximate randomization.
        num_samples: Number of resamples or of trials.

    Returns:
        A result for each system, and the seed: 12345, or the environment variable `SACREBLEU_SEED`.

    Raises:
        ValueError: If the test would need more than `MAX_TEST_BYTES`.
    """
    first = next(iter(systems.values()))
    bytes_per_sample = len(first.rows) * (4 * (len(first.rows[0]) + 2) if kind == "bs" else 8)
    if num_samples * bytes_per_sample > MAX_TEST_BYTES:
        raise ValueError(
            f"`paired_{kind}_n` must be at most {MAX_TEST_BYTES // bytes_per_sample} for {len(first.rows)} segments, "
            f"got {num_samples}: the test would need {num_samples * bytes_per_sample / 1e9:.0f} GB of memory."
        )
    scorer = _Known(first.scorer)
    # Products of floats are fast. The sums are the same: all counts are whole numbers below 2**53.
    rows = [(name, np.asarray(segments.rows, dtype=np.float64)) for name, segments in systems.items()]
    signatures, results = PairedTest(rows, {"score": scorer}, None, kind, num_samples)()
    [(name, signature)] = signatures.items()
    return results[name], signature.info["seed"]


References = Sequence[str] | Sequence[Sequence[str]]
_COLUMNS = ("predictions", "references")


def check_choice(field: str, value: Any, choices: Collection[str]) -> None:
    """Raise a `ValueError`, with the nearest choice as a hint, if a value is not one of the choices."""
    if value not in choices:
        hint = did_you_mean(value, choices, cutoff=0.4)
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{hint}")


def _as_reference_lists(predictions: Sequence[str], references: References) -> list[list[str]]:
    """Check both columns and return one list of references for each prediction.

    Raises:
        ValueError: If a column is missing or empty, the lengths differ, or an entry is not text.
    """
    for name, column in zip(_COLUMNS, (predictions, references), strict=True):
        if column is None or isinstance(column, str):
            raise ValueError(f"`{name}` must be a sequence of texts, got {type(column).__name__}.")
    if not len(predictions) == len(references) > 0:
        raise ValueError(
            "`predictions` and `references` must hold the same number of entries, at least one, "
            f"got {len(predictions)} and {len(references)}."
        )
    is_single = isinstance(references[0], str)
    for index, (prediction, entry) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise ValueError(f"`predictions` must hold texts, got {prediction!r} at index {index}.")
        is_list = isinstance(entry, list | tuple) and len(entry) > 0 and all(isinstance(text, str) for text in entry)
        if not (isinstance(entry, str) if is_single else is_list):
            kind = "texts" if is_single else "non-empty lists of texts"
            raise ValueError(f"`references` must hold {kind} only, like its first entry, got {entry!r} at {index}.")
    return [[entry] if is_single else list(entry) for entry in references]


def number_of_references(references: list[list[str]]) -> str:
    """Return the number of references for a signature."""
    counts = {len(texts) for texts in references}
    return str(counts.pop()) if len(counts) == 1 else "var"


class CorpusMetric(evaluate.Metric):
    """A corpus score.

    `references` holds one text, or a list of texts, for each prediction. An empty prediction is valid. Everything stays in
    memory, except with `num_process` above 1.
    """

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(*args, **kwargs)

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the options of `compute`."""
        return [name for name in inspect.signature(cls._compute).parameters if name not in ("self", *_COLUMNS)]

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)),
            citation="",
            inputs_description=inspect.getdoc(CorpusMetric),
            features=Features({"predictions": Value("string"), "references": List(Value("string"))}),
        )

    def _build_data_dir(self) -> str:
        # The base class makes a folder in the home folder even if it keeps everything in memory.
        if self.keep_in_memory:
            return os.path.join(self._data_dir_root, self.name, self.config_name)
        return super()._build_data_dir()

    def compute(self, *, predictions=None, references=None, **kwargs) -> dict[str, Any] | None:
        """Return the score of all added texts and of these."""
        for name in kwargs:
            check_choice(f"An option of `{type(self).__name__}`", name, self.option_names())
        if predictions is None and references is None and self.writer is None:
            raise ValueError("`predictions` and `references` must hold at least one entry each, got 0 and 0.")
        return super().compute(predictions=predictions, references=references, **kwargs)

    def segments(self, predictions: Sequence[str], references: References, **options) -> SegmentStatistics:
        """Return the statistics of each line, for intervals and tests. The options are those of `compute`."""
        return self._segments(predictions, _as_reference_lists(predictions, references), **options)

    def add_batch(self, *, predictions=None, references=None, **kwargs) -> None:
        """Add predictions and their references."""
        references = _as_reference_lists(predictions, references)
        super().add_batch(predictions=list(predictions), references=references, **kwargs)

    def add(self, *, prediction=None, reference=None, **kwargs) -> None:
        """Add one prediction and its reference or references."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)


DEFAULT_METRICS = ("bleu", "chrf")


class SacreBleuMetric(CorpusMetric):
    """A score of sacreBLEU, with the options of its class there."""

    scorer_class: ClassVar[type]
    fixed_options: ClassVar[dict[str, Any]] = {}
    details: ClassVar[tuple[str, ...]]

    @classmethod
    def option_names(cls) -> list[str]:
        names = [name for name in inspect.signature(cls.scorer_class).parameters if name != "references"]
        return [name for name in names if name not in cls.fixed_options]

    def _segments(self, predictions, references, **options) -> SegmentStatistics:
        scorer = self.scorer_class(**options, **self.fixed_options)
        # One document for each number of a reference. None fills up lines with fewer references.
        documents = [
            [texts[number] if number < len(texts) else None for texts in references]
            for number in range(max(len(texts) for texts in references))
        ]
        rows = scorer._extract_corpus_statistics(list(predictions), documents)
        return SegmentStatistics(scorer, rows, str(scorer.get_signature()))

    def _compute(self, predictions, references, **options) -> dict[str, Any]:
        segments = self._segments(predictions, references, **options)
        score = segments.scorer._aggregate_and_compute(segments.rows)
        result = {"score": score.score} | {name: getattr(score, name) for name in self.details}
        return result | {"signature": segments.signature}


class Bleu(SacreBleuMetric):
    """BLEU (Papineni et al. 2002).

    `tokenize="none"` splits at spaces, for tokenized text: a different quantity from BLEU on plain text, as its signature
    says.
    """

    scorer_class = BLEU
    details = ("precisions", "counts", "totals", "bp", "sys_len", "ref_len")

    def _segments(self, predictions, references, **options) -> SegmentStatistics:
        if options.get("tokenize") is not None:
            check_choice("`tokenize`", options["tokenize"], BLEU.TOKENIZERS)
        check_choice("`smooth_method`", options.get("smooth_method", "exp"), BLEU.SMOOTH_DEFAULTS)
        # sacreBLEU warns about tokenized text, which is right with `tokenize="none"`.
        options.setdefault("force", options.get("tokenize") == "none")
        return super()._segments(predictions, references, **options)


class ChrF(SacreBleuMetric):
    """chrF (Popović 2015); with `word_order=2` chrF++ (Popović 2017)."""

    scorer_class = CHRF
    details = ("char_order", "word_order", "beta")


class ChrFPlusPlus(ChrF):
    """chrF++: chrF with words and pairs of words beside characters (Popović 2017)."""

    fixed_options: ClassVar[dict[str, Any]] = {"word_order": 2}


class Ter(SacreBleuMetric):
    """Translation edit rate, lower is better (Snover et al. 2006)."""

    scorer_class = TER
    details = ("num_edits", "ref_length")


class Rouge(CorpusMetric):
    """ROUGE F-measures by rouge_score, the mean over all lines; `score` is ROUGE-L (Lin 2004).

    The best of several references counts, separately for each kind. `rougeLsum` needs newlines between the sentences of both
    columns; without them it equals `rougeL`. The default tokenizer keeps only a-z and 0-9, so that Greek or Chinese scores
    zero: `references_without_tokens` counts such lines. `tokenize="none"` splits at spaces instead and keeps case.
    """

    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    @staticmethod
    def _lines(predictions, references, use_stemmer: bool, tokenize: str) -> tuple[Any, list[dict], str]:
        """Return the tokenizer, the scores of each line, and the signature."""
        from rouge_score import rouge_scorer, tokenizers  # takes a second to import

        check_choice("`tokenize`", tokenize, ("default", "none"))
        if tokenize == "none" and use_stemmer:
            raise ValueError('`use_stemmer` must be False when `tokenize` is "none", got True.')
        at_spaces = SimpleNamespace(tokenize=str.split)
        tokenizer = at_spaces if tokenize == "none" else tokenizers.DefaultTokenizer(use_stemmer)
        scorer = rouge_scorer.RougeScorer(Rouge.kinds, tokenizer=tokenizer)
        lines = [scorer.score_multi(texts, line) for line, texts in zip(predictions, references, strict=True)]
        stem = "yes" if use_stemmer else "no"
        signature = f"nrefs:{number_of_references(references)}|stem:{stem}|tok:{tokenize}"
        return tokenizer, lines, f"{signature}|rouge_score:{version('rouge_score')}"

    def _segments(self, predictions, references, use_stemmer: bool = False, tokenize: str = "default"):
        _, lines, signature = self._lines(predictions, references, use_stemmer, tokenize)
        return SegmentStatistics(Ratio(), [(line["rougeL"].fmeasure, 1) for line in lines], signature)

    def _compute(self, predictions, references, use_stemmer: bool = False, tokenize: str = "default") -> dict[str, Any]:
        tokenizer, lines, signature = self._lines(predictions, references, use_stemmer, tokenize)
        scores = {kind: 100 * float(np.mean([line[kind].fmeasure for line in lines])) for kind in self.kinds}
        return {
            "score": scores["rougeL"],
            **scores,
            "references_without_tokens": sum(not any(map(tokenizer.tokenize, texts)) for texts in references),
            "signature": signature,
        }


class ExactMatch(CorpusMetric):
    """Share of predictions that equal a reference.

    `ignore_case` folds case. `ignore_punctuation` drops Unicode punctuation (categories P) and surplus spaces.
    """

    def _segments(self, predictions, references, ignore_case: bool = False, ignore_punctuation: bool = False):
        def plain(text: str) -> str:
            if ignore_case:
                text = text.casefold()
            if ignore_punctuation:
                text = "".join(mark for mark in text if not unicodedata.category(mark).startswith("P"))
                text = " ".join(text.split())
            return text

        pairs = zip(predictions, references, strict=True)
        rows = [(int(plain(prediction) in map(plain, texts)), 1) for prediction, texts in pairs]
        case, punctuation = ("ci" if ignore_case else "mixed"), ("no" if ignore_punctuation else "yes")
        signature = f"nrefs:{number_of_references(references)}|case:{case}|punct:{punctuation}"
        return SegmentStatistics(Ratio(), rows, signature)

    def _compute(self, predictions, references, ignore_case: bool = False, ignore_punctuation: bool = False):
        segments = self._segments(predictions, references, ignore_case, ignore_punctuation)
        matches, num_examples = map(sum, zip(*segments.rows, strict=True))
        return {
            "score": 100 * matches / num_examples,
            "matches": matches,
            "num_examples": num_examples,
            "signature": segments.signature,
        }


def count_edits(prediction: Sequence, reference: Sequence) -> tuple[int, int, int]:
    """Return the substitutions, insertions and deletions that turn a reference into a prediction.

    Their sum is the Levenshtein distance, with as few substitutions as possible. A row of the table is computed at once:
    insertions are a running minimum, substitutions a small surcharge on the cost. The difference of the lengths separates
    insertions from deletions.
    """
    numbers: dict[Any, int] = {}
    row_tokens, column_tokens = (
        np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), dtype=np.int64)
        for tokens in (reference, prediction)
    )
    edit_cost = len(reference) + len(prediction) + 1  # more than the surcharge of all substitutions
    insertions = edit_cost * np.arange(len(prediction) + 1)
    costs = insertions
    for row_token in row_tokens:
        candidates = costs + edit_cost
        replaced = costs[:-1] + (column_tokens != row_token) * (edit_cost + 1)
        np.minimum(candidates[1:], replaced, out=candidates[1:])
        costs = np.minimum.accumulate(candidates - insertions) + insertions
    edits, substitutions = divmod(int(costs[-1]), edit_cost)
    surplus = len(prediction) - len(reference)
    return substitutions, (edits - substitutions + surplus) // 2, (edits - substitutions - surplus) // 2


class WordErrorRate(CorpusMetric):
    """Word edits over all lines, in percent of the words of the references. Words are split at spaces.

    Lower is better, and more than 100 is possible. The reference with the fewest edits counts, of equals the longest. An empty
    reference adds the words of the prediction as insertions; `empty_references` counts empty references. References without
    any word are refused.
    """

    unit = "word"

    @staticmethod
    def units(text: str) -> Sequence[str]:
        """Return the units of a text."""
        return text.split()

    def _edits(self, predictions, references, lowercase: bool) -> Iterator[tuple[tuple[int, int, int], int]]:
        """Yield the edits of each line, and the length of its reference."""
        for prediction, texts in zip(predictions, references, strict=True):
            units, *candidates = (self.units(text.lower() if lowercase else text) for text in (prediction, *texts))
            counted = [(count_edits(units, candidate), len(candidate)) for candidate in candidates]
            yield min(counted, key=lambda pair: (sum(pair[0]), -pair[1]))

    def _signature(self, references, lowercase: bool) -> str:
        case = "lc" if lowercase else "mixed"
        return f"nrefs:{number_of_references(references)}|case:{case}|unit:{self.unit}"

    def _segments(self, predictions, references, lowercase: bool = False) -> SegmentStatistics:
        rows = [(sum(edits), length) for edits, length in self._edits(predictions, references, lowercase)]
        return SegmentStatistics(Ratio(), rows, self._signature(references, lowercase))

    def _compute(self, predictions, references, lowercase: bool = False) -> dict[str, Any]:
        edits, lengths = zip(*self._edits(predictions, references, lowercase), strict=True)
        if not any(lengths):
            raise ValueError(
                f"`references` must hold at least one {self.unit}, got {len(references)} empty references."
            )
        substitutions, insertions, deletions = map(sum, zip(*edits, strict=True))
        return {
            "score": 100 * (substitutions + insertions + deletions) / sum(lengths),
            "substitutions": substitutions,
            "insertions": insertions,
            "deletions": deletions,
            "ref_length": sum(lengths),
            "empty_references": lengths.count(0),
            "signature": self._signature(references, lowercase),
        }


class CharacterErrorRate(WordErrorRate):
    """Character edits (Unicode code points, spaces included), otherwise as `WordErrorRate`."""

    unit = "character"

    @staticmethod
    def units(text: str) -> Sequence[str]:
        return text


METRICS: dict[str, type[CorpusMetric]] = {
    "bleu": Bleu,
    "chrf": ChrF,
    "chrf++": ChrFPlusPlus,
    "ter": Ter,
    "rouge": Rouge,
    "exact_match": ExactMatch,
    "wer": WordErrorRate,
    "cer": CharacterErrorRate,
}


def check_metrics(names: Sequence[str], bleu_tokenize: str | None = None) -> None:
    """Refuse wrong names and tokenizers before any work.

    Args:
        names: Keys of `METRICS`.
        bleu_tokenize: Tokenizer of sacreBLEU, which is downloaded if need be.

    Raises:
        ValueError: If a score or tokenizer is unknown or not installed, or `names` lacks BLEU.
    """
    _check_names("metrics", names)
    if bleu_tokenize is None:
        return
    if "bleu" not in names:
        raise ValueError(f"`metrics` must hold bleu with `bleu_tokenize`, got {list(names)} and {bleu_tokenize!r}.")
    check_choice("`bleu_tokenize`", bleu_tokenize, BLEU.TOKENIZERS)
    try:
        BLEU(tokenize=bleu_tokenize)
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"`bleu_tokenize` must be installed, got {bleu_tokenize!r}: {reason}") from error


def _check_names(field: str, names: Sequence[str]) -> None:
    for name in names:
        check_choice(f"A name in `{field}`", name, METRICS)


def metric_options(
    names: Sequence[str], bleu_tokenize: str | None = None, lowercase: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the options of each score, for `compute_metrics`.

    Raises:
        ValueError: If `lowercase` is True and no score depends on case.
    """
    options: dict[str, dict] = {} if bleu_tokenize is None else {"bleu": {"tokenize": bleu_tokenize}}
    if lowercase:
        known = {name: {"lowercase", "ignore_case"}.intersection(METRICS[name].option_names()) for name in names}
        if not any(known.values()):
            raise ValueError(f"`metrics` must hold a score that depends on case with `lowercase`, got {list(names)}.")
        for name, keys in known.items():
            options.setdefault(name, {}).update(dict.fromkeys(keys, True))
    return {name: values for name, values in options.items() if values}


def check_references(references: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse references that have no score, before any work.

    Args:
        references: One text for each example.
        names: Keys of `METRICS`.
        where: Description of the references for the message.

    Raises:
        ValueError: If a score is unknown, or an error rate has no word or character to count.
    """
    _check_names("metrics", names)
    for name in names:
        metric = METRICS[name]
        if issubclass(metric, WordErrorRate) and not any(map(metric.units, references)):
            raise ValueError(
                f"`metrics` must not hold {name} if no reference has a {metric.unit}, got {len(references)} empty {where}."
            )


def compute_metrics(
    predictions: Sequence[str],
    references: References,
    names: Sequence[str] = DEFAULT_METRICS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    num_bootstrap_samples: int = 0,
) -> dict[str, dict[str, Any]]:
    """Return `{name: result}` for JSON.

    Args:
        predictions: One text for each example.
        references: One text, or a list of texts, for each example.
        names: Keys of `METRICS`.
        options: Keyword arguments of a score by its name: `{"bleu": {"tokenize": "none"}}`.
        num_bootstrap_samples: Resamples for the 95 % interval of each score; 0 for no interval.

    Raises:
        ValueError: If a name or option is unknown, options belong to no score of `names`, or the corpora are empty or differ
            in length.
    """
    if isinstance(names, str):
        raise ValueError(f"`names` must be a sequence of names, got the text {names!r}.")
    _check_names("names", names)
    options = options or {}
    for name in options:
        check_choice("A key of `options`", name, names)
    results = {}
    for name in names:
        metric, columns = METRICS[name](), {"predictions": predictions, "references": references}
        results[name] = metric.compute(**columns, **options.get(name, {}))
        if num_bootstrap_samples:
            segments = metric.segments(**columns, **options.get(name, {}))
            results[name] |= segments.interval(num_bootstrap_samples)
    return results


def to_json(metrics: Mapping[str, Any]) -> str:
    """Return metrics as JSON. Raise a `ValueError` for a value that JSON lacks, such as NaN."""
    try:
        return json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`metrics` must hold finite numbers, texts, lists and dicts only: {error}.") from error


def is_folder(path: str | os.PathLike) -> bool:
    """Return True if a path is an existing folder, or ends in a slash."""
    return Path(path).is_dir() or os.fspath(path).endswith(("/", os.sep))


def metrics_path(path: str | os.PathLike) -> Path:
    """Return the file of `write_metrics`: for a folder, `metrics.json` in it."""
    return Path(path) / "metrics.json" if is_folder(path) else Path(path)


def check_writable(path: str | os.PathLike) -> Path:
    """Check that `write_metrics` can write, make missing folders, and return the path of the file.

    Raises:
        ValueError: If the path is not a file, or the folder cannot be made or written to.
    """
    path = metrics_path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"`output` must be a file, or a folder for metrics.json, got {path}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Permissions do not suffice: a file system may be read-only.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"`output` must be in a folder that can be written to, got {path}: {error}") from error
    return path


def write_metrics(path: str | os.PathLike, metrics: Mapping[str, Any]) -> Path:
    """Write metrics as JSON by an atomic rename, and return the path (see `metrics_path`).

    Raises:
        ValueError: As `to_json`. The old file stays.
    """
    path, text = metrics_path(path), to_json(metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_in_one_step(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path
