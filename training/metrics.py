"""Scores of a corpus of predictions against references, as `evaluate.Metric` classes that never touch the network.

Rates and shares are in percent. Every result holds a `score` and a `signature`; two scores may be compared only when
their signatures are equal. BLEU, chrF and TER are sacreBLEU's, under its option names (Post 2018, arXiv 1804.08771).
"""

import difflib
import inspect
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Features, List, Value
from sacrebleu.metrics import BLEU, CHRF, TER

References = Sequence[str] | Sequence[Sequence[str]]
_COLUMNS = ("predictions", "references")
DEFAULT_METRICS = ("bleu", "chrf")


def _check_choice(field: str, given: Any, choices: Iterable[str]) -> None:
    choices = list(choices)
    if given in choices:
        return
    nearest = difflib.get_close_matches(str(given), choices, n=1, cutoff=0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{field} must be one of {', '.join(choices)}, got {given!r}.{hint}")


def _as_reference_lists(predictions: Sequence[str], references: References) -> list[list[str]]:
    """Returns one list of references for each prediction, after checking both columns.

    Raises:
        ValueError: If a column is missing or empty, the lengths differ, or an entry is not text.
    """
    for name, column in zip(_COLUMNS, (predictions, references), strict=True):
        if column is None or isinstance(column, str):
            raise ValueError(f"`{name}` must be a sequence of texts, got {type(column).__name__}.")
    if len(predictions) != len(references) or len(predictions) == 0:
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
            wanted = "texts" if is_single else "non-empty lists of texts"
            raise ValueError(
                f"`references` must hold {wanted} only, as its first entry does, got {entry!r} at {index}."
            )
    return [[entry] if is_single else list(entry) for entry in references]


def _number_of_references(references: list[list[str]]) -> str:
    counts = {len(texts) for texts in references}
    return str(counts.pop()) if len(counts) == 1 else "var"


class CorpusMetric(evaluate.Metric):
    """What all scores share: two columns, their checks, and no files.

    `references` holds one text for each prediction, or a list of texts for each. An empty prediction is valid.
    Everything stays in memory; only with `num_process` above 1 does evaluate's cache folder come into use.
    """

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(*args, **kwargs)

    @classmethod
    def option_names(cls) -> list[str]:
        """Returns the keyword arguments that `compute` takes beside the two columns."""
        return [name for name in inspect.signature(cls._compute).parameters if name not in ("self", *_COLUMNS)]

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)),
            citation="",
            inputs_description=inspect.getdoc(CorpusMetric),
            features=Features({"predictions": Value("string"), "references": List(Value("string"))}),
        )

    def _build_data_dir(self) -> str:
        # The base class makes a folder below the user's home even when it keeps everything in memory.
        if self.keep_in_memory:
            return os.path.join(self._data_dir_root, self.name, self.config_name)
        return super()._build_data_dir()

    def compute(self, *, predictions=None, references=None, **kwargs) -> dict[str, Any] | None:
        """Returns the score of what was added before, together with what is given here."""
        for name in kwargs:
            _check_choice(f"An option of `{type(self).__name__}`", name, self.option_names())
        if predictions is None and references is None and self.writer is None:
            raise ValueError("`predictions` and `references` must hold at least one entry each, got 0 and 0.")
        return super().compute(predictions=predictions, references=references, **kwargs)

    def add_batch(self, *, predictions=None, references=None, **kwargs) -> None:
        """Adds predictions and their references."""
        references = _as_reference_lists(predictions, references)
        super().add_batch(predictions=list(predictions), references=references, **kwargs)

    def add(self, *, prediction=None, reference=None, **kwargs) -> None:
        """Adds one prediction and its reference, or its list of references."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)


class SacreBleuMetric(CorpusMetric):
    """A score that sacreBLEU computes, with the options of its class there."""

    scorer_class: ClassVar[type]
    fixed_options: ClassVar[dict[str, Any]] = {}
    details: ClassVar[tuple[str, ...]]

    @classmethod
    def option_names(cls) -> list[str]:
        names = [name for name in inspect.signature(cls.scorer_class).parameters if name != "references"]
        return [name for name in names if name not in cls.fixed_options]

    def _compute(self, predictions, references, **options) -> dict[str, Any]:
        scorer = self.scorer_class(**options, **self.fixed_options)
        # One document for each reference number; `None` marks a line that has fewer references than another.
        documents = [
            [texts[number] if number < len(texts) else None for texts in references]
            for number in range(max(len(texts) for texts in references))
        ]
        score = scorer.corpus_score(list(predictions), documents)
        result = {"score": score.score} | {name: getattr(score, name) for name in self.details}
        return result | {"signature": str(scorer.get_signature())}


class Bleu(SacreBleuMetric):
    """BLEU (Papineni et al. 2002).

    `tokenize="none"` scores tokens split at spaces, for text that is tokenised already: a different quantity from BLEU
    on plain text, as its signature says.
    """

    scorer_class = BLEU
    details = ("precisions", "counts", "totals", "bp", "sys_len", "ref_len")

    def _compute(self, predictions, references, **options) -> dict[str, Any]:
        if options.get("tokenize") is not None:
            _check_choice("`tokenize`", options["tokenize"], BLEU.TOKENIZERS)
        _check_choice("`smooth_method`", options.get("smooth_method", "exp"), BLEU.SMOOTH_DEFAULTS)
        # sacreBLEU warns of tokenised text, which is no mistake where `tokenize="none"` asks for it.
        options.setdefault("force", options.get("tokenize") == "none")
        return super()._compute(predictions, references, **options)


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


class _SpaceTokenizer:
    def tokenize(self, text: str) -> list[str]:
        return text.split()


class Rouge(CorpusMetric):
    """ROUGE F-measures by rouge_score, the mean over all lines; `score` is ROUGE-L (Lin 2004).

    Of several references the best one counts, for each kind by itself. `rougeLsum` takes newlines as the ends of
    sentences: put one between the sentences of both columns, else it is `rougeL` under another name. The default
    tokenizer keeps only a-z and 0-9, so that Greek or Chinese scores zero: `references_without_tokens` counts such
    lines, and `tokenize="none"` splits at spaces instead, case kept.
    """

    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def _compute(self, predictions, references, use_stemmer: bool = False, tokenize: str = "default") -> dict[str, Any]:
        from rouge_score import rouge_scorer, tokenizers  # takes a second to import

        _check_choice("`tokenize`", tokenize, ("default", "none"))
        if tokenize == "none" and use_stemmer:
            raise ValueError('`use_stemmer` must be False when `tokenize` is "none", got True.')
        tokenizer = _SpaceTokenizer() if tokenize == "none" else tokenizers.DefaultTokenizer(use_stemmer)
        scorer = rouge_scorer.RougeScorer(self.kinds, tokenizer=tokenizer)
        lines = [scorer.score_multi(texts, line) for line, texts in zip(predictions, references, strict=True)]
        scores = {kind: 100 * float(np.mean([line[kind].fmeasure for line in lines])) for kind in self.kinds}
        stem = "yes" if use_stemmer else "no"
        return {
            "score": scores["rougeL"],
            **scores,
            "references_without_tokens": sum(not any(map(tokenizer.tokenize, texts)) for texts in references),
            "signature": f"nrefs:{_number_of_references(references)}|stem:{stem}|tok:{tokenize}"
            f"|rouge_score:{version('rouge_score')}",
        }


class ExactMatch(CorpusMetric):
    """Share of the predictions that equal a reference, character by character.

    `ignore_case` folds case; `ignore_punctuation` drops the characters of all Unicode categories P, then evens out
    spaces.
    """

    def _compute(self, predictions, references, ignore_case: bool = False, ignore_punctuation: bool = False):
        def plain(text: str) -> str:
            if ignore_case:
                text = text.casefold()
            if ignore_punctuation:
                text = "".join(mark for mark in text if not unicodedata.category(mark).startswith("P"))
                text = " ".join(text.split())
            return text

        pairs = zip(predictions, references, strict=True)
        matches = sum(plain(prediction) in map(plain, texts) for prediction, texts in pairs)
        case, punctuation = ("ci" if ignore_case else "mixed"), ("no" if ignore_punctuation else "yes")
        return {
            "score": 100 * matches / len(predictions),
            "matches": matches,
            "num_examples": len(predictions),
            "signature": f"nrefs:{_number_of_references(references)}|case:{case}|punct:{punctuation}",
        }


def count_edits(prediction: Sequence, reference: Sequence) -> tuple[int, int, int]:
    """Returns the substitutions, insertions and deletions that turn a reference into a prediction.

    Their sum is the Levenshtein distance; of the ways with that sum, one with the fewest substitutions is counted. A
    row of the table is computed at once, insertions being a running minimum. Substitutions ride along as a small
    surcharge on the cost, and the lengths' difference tells insertions from deletions, so that no table is kept.
    """
    numbers: dict[Any, int] = {}
    row_tokens, column_tokens = (
        np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), dtype=np.int64)
        for tokens in (reference, prediction)
    )
    edit_cost = len(reference) + len(prediction) + 1  # more than all substitutions together
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
    """Edits on words split at spaces, over all lines, in percent of the references' words.

    Lower is better, and more than 100 is possible. Of several references the one with the fewest edits counts, of
    equals the longest. An empty reference adds the prediction's words as insertions and nothing to the length;
    `empty_references` counts them. References without any word at all are refused.
    """

    unit = "word"

    def _split(self, text: str) -> Sequence[str]:
        return text.split()

    def _compute(self, predictions, references, lowercase: bool = False) -> dict[str, Any]:
        totals, length, empty = np.zeros(3, dtype=np.int64), 0, 0
        for prediction, texts in zip(predictions, references, strict=True):
            units, *candidates = (self._split(text.lower() if lowercase else text) for text in (prediction, *texts))
            counted = [(count_edits(units, candidate), len(candidate)) for candidate in candidates]
            edits, chosen_length = min(counted, key=lambda pair: (sum(pair[0]), -pair[1]))
            totals, length, empty = totals + edits, length + chosen_length, empty + (chosen_length == 0)
        if length == 0:
            raise ValueError(
                f"`references` must hold at least one {self.unit}, got {len(references)} empty references."
            )
        substitutions, insertions, deletions = totals.tolist()
        case = "lc" if lowercase else "mixed"
        return {
            "score": 100 * int(totals.sum()) / length,
            "substitutions": substitutions,
            "insertions": insertions,
            "deletions": deletions,
            "ref_length": length,
            "empty_references": empty,
            "signature": f"nrefs:{_number_of_references(references)}|case:{case}|unit:{self.unit}",
        }


class CharacterErrorRate(WordErrorRate):
    """Edits on characters (Unicode code points, spaces among them), in percent of the references' characters.

    All else is as in `WordErrorRate`.
    """

    unit = "character"

    def _split(self, text: str) -> Sequence[str]:
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
    """Refuses before any work what `compute_metrics` would refuse after it.

    Args:
        names: Keys of `METRICS`.
        bleu_tokenize: sacreBLEU's tokenizer; one that has to be fetched is fetched.

    Raises:
        ValueError: If there is no such score or tokenizer, or what the tokenizer needs is not installed.
    """
    for name in names:
        _check_choice("A name in `metrics`", name, METRICS)
    if bleu_tokenize is None:
        return
    _check_choice("`bleu_tokenize`", bleu_tokenize, BLEU.TOKENIZERS)
    try:
        BLEU(tokenize=bleu_tokenize)
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"`bleu_tokenize` must be installed, got {bleu_tokenize!r}: {reason}") from error


def compute_metrics(
    predictions: Sequence[str],
    references: References,
    names: Sequence[str] = DEFAULT_METRICS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns `{name: result}`, ready for JSON.

    Args:
        predictions: One text for each example.
        references: One text, or a list of texts, for each example.
        names: Keys of `METRICS`.
        options: Keyword arguments of a score under its name: `{"bleu": {"tokenize": "none"}}`.

    Raises:
        ValueError: If a name or option is unknown, options are given for a score that is not asked for, or the corpora
            are empty or of different lengths.
    """
    if isinstance(names, str):
        raise ValueError(f"`names` must be a sequence of names, got the text {names!r}.")
    for name in names:
        _check_choice("A name in `names`", name, METRICS)
    options = dict(options or {})
    for name in options:
        _check_choice("A key of `options`", name, names)
    return {
        name: METRICS[name]().compute(predictions=predictions, references=references, **options.get(name, {}))
        for name in names
    }


def write_metrics(path: str | os.PathLike, metrics: Mapping[str, Any]) -> Path:
    """Writes `metrics` as JSON in one step, so that a reader finds the old file or the new one, and returns its path.

    A folder stands for `metrics.json` in it.

    Raises:
        ValueError: If a value is no JSON, as are NaN and infinity; the file is then left as it was.
    """
    path = Path(path)
    path = path / "metrics.json" if path.is_dir() else path
    try:
        text = json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`metrics` must hold finite numbers, texts, lists and dicts only: {error}.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
