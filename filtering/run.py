"""A run of all rules over the pairs of a corpus, chunk by chunk, which can be killed and resumed."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from metaphrase.data.pair_files import PairProblem, Record, json_line, tsv_line
from metaphrase.data.pairs import PROBLEMS, PairSource
from metaphrase.filtering.alignment import MAX_PAIRS, MIN_PAIRS, AlignmentModel
from metaphrase.filtering.rules import RULES, CorpusFacts, LanguageRule, Pair, PairRules, Thresholds, normal_forms
from metaphrase.filtering.texts import SeenHashes, hash_text, normalize
from metaphrase.filtering.work_folder import WorkFolder
from metaphrase.storage.folders import json_text
from metaphrase.tokenization.texts import shard_range

logger = logging.getLogger(__name__)

PAIRS_PER_CHUNK = 10_000
NUM_EXAMPLES = 5
_SEED = 0
# Returns the dual cross-entropy score of each pair, from 0 to 1.
PairScorer = Callable[[Sequence[Pair]], Sequence[float]]
_LINE_BREAKS = str.maketrans("\r\n", "  ")


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Settings of a run.

    Attributes:
        rules: Names of the active rules.
        thresholds: Thresholds of the rules.
        source_lang: Language of the sources for the rule `language`; `None` to accept any.
        target_lang: The same for the targets.
        near_duplicates: True to compare normal forms in the rule `duplicate`, False to compare the texts themselves.
        normalize: True to normalize texts before the rules see them.
        models: Names of the models of the rule `dual_cross_entropy`, in both directions.
    """

    rules: Collection[str] = RULES
    thresholds: Thresholds = field(default_factory=Thresholds)
    source_lang: str | None = None
    target_lang: str | None = None
    near_duplicates: bool = True
    normalize: bool = False
    models: tuple[str, str] | None = None


class _Candidate(NamedTuple):
    source: str
    target: str
    forms: Pair


class PairFilter:
    """All rules, prepared for one corpus.

    Attributes:
        num_records: Number of pairs of the corpus, with those that cannot be used.
        alignment: The model of the rule `alignment`; `None` if the rule is off.
    """

    def __init__(self, source: PairSource, settings: FilterSettings, score_pairs: PairScorer | None = None):
        """Read the corpus once and learn from a sample of it.

        Args:
            source: Files with the pairs.
            settings: The settings.
            score_pairs: Scores of two models for the rule `dual_cross_entropy`; without them the rule is off.

        Raises:
            ImportError: If a package of the extra `filter` is missing.
            ValueError: If the files are broken or hold no pair, or a language is unknown.
        """
        self._source, self._settings = source, settings
        active = set(settings.rules)
        self._score_pairs = score_pairs if "dual_cross_entropy" in active else None
        self._language_rule = None
        if "language" in active and (settings.source_lang, settings.target_lang) != (None, None):
            least = settings.thresholds.min_language_probability
            self._language_rule = LanguageRule(settings.source_lang, settings.target_lang, least)
        # Packages that are missing must show before the corpus is read.
        PairRules(active, settings.thresholds, CorpusFacts())
        self.num_records, sample = sample_pairs(source.read_files(), MAX_PAIRS)
        check_sample(source, self.num_records, sample)
        if settings.normalize:
            sample = [(normalize(first), normalize(second)) for first, second in sample]
        self._rules = PairRules(active, settings.thresholds, CorpusFacts.of(sample))
        self.alignment = self._learn_alignment(sample) if "alignment" in active else None

    def _learn_alignment(self, sample: Sequence[Pair]) -> AlignmentModel | None:
        usable = {}
        for pair in sample:
            forms = normal_forms(*pair)
            if self._rules.broken_rule(*pair, forms) is None:
                usable.setdefault(forms, pair)
        if len(usable) < MIN_PAIRS:
            logger.info("The rule `alignment` is off: it needs %d pairs, got %d.", MIN_PAIRS, len(usable))
            return None
        return AlignmentModel(list(usable.values()), _SEED)

    def decide(
        self, records: Sequence[Record], seen_pairs: SeenHashes, seen_sources: SeenHashes
    ) -> tuple[list[tuple[str, Pair]], bytes, bytes]:
        """Apply all rules to records.

        Args:
            records: Pairs, or problems with a pair.
            seen_pairs: Hashes of earlier pairs. The new ones are added.
            seen_sources: Hashes of the sources of earlier pairs that were kept. The new ones are added.

        Returns:
            The broken rule, or an empty text, and the pair of each record. New hashes of pairs and of sources.
        """
        verdicts: list[tuple[str, Pair]] = []
        candidates: dict[int, _Candidate] = {}
        for record in records:
            if isinstance(record, PairProblem):
                verdicts.append((record.kind, (record.message, "")))
                continue
            source, target = map(normalize, record) if self._settings.normalize else record
            forms = normal_forms(source, target)
            verdicts.append((self._rules.broken_rule(source, target, forms) or "", (source, target)))
            if not verdicts[-1][0]:
                candidates[len(verdicts) - 1] = _Candidate(source, target, forms)

        def drop(rule: str, indexes: Iterator[int]) -> None:
            for index in list(indexes):
                verdicts[index] = (rule, verdicts[index][1])
                del candidates[index]

        pair_hashes = self._drop_duplicates(candidates, seen_pairs, drop)
        if self._language_rule is not None:
            drop("language", (i for i, pair in candidates.items() if self._language_rule.breaks(*pair[:2])))
        if self.alignment is not None:
            scores = self.alignment.scores([pair[:2] for pair in candidates.values()])
            low = scores < self.alignment.threshold
            drop("alignment", (i for i, is_low in zip(candidates, low, strict=True) if is_low))
        if self._score_pairs is not None:
            dual = self._score_pairs([pair[:2] for pair in candidates.values()])
            least = self._settings.thresholds.min_dual_score
            drop("dual_cross_entropy", (i for i, score in zip(candidates, dual, strict=True) if score < least))
        return verdicts, pair_hashes, self._drop_targets(candidates, seen_sources, drop)

    def _drop_duplicates(self, candidates: dict[int, _Candidate], earlier: SeenHashes, drop: Callable) -> bytes:
        if "duplicate" not in self._settings.rules:
            return b""
        is_near = self._settings.near_duplicates
        hashes = [hash_text("\t".join(pair.forms if is_near else pair[:2])) for pair in candidates.values()]
        return _drop_repeated("duplicate", hashes, 1, candidates, earlier, drop)

    def _drop_targets(self, candidates: dict[int, _Candidate], earlier: SeenHashes, drop: Callable) -> bytes:
        if "targets_per_source" not in self._settings.rules:
            return b""
        hashes = [hash_text(pair.source) for pair in candidates.values()]
        most = self._settings.thresholds.max_targets_per_source
        return _drop_repeated("targets_per_source", hashes, most, candidates, earlier, drop)


def _drop_repeated(
    rule: str,
    hashes: Sequence[bytes],
    most: int,
    candidates: dict[int, _Candidate],
    earlier: SeenHashes,
    drop: Callable,
) -> bytes:
    """Drop candidates whose hash occurred `most` times before. Return the hashes of the others."""
    is_new = earlier.counts(hashes) < most
    drop(rule, (index for index, new in zip(candidates, is_new, strict=True) if not new))
    new_hashes = [value for value, new in zip(hashes, is_new, strict=True) if new]
    earlier.add(new_hashes)
    return b"".join(new_hashes)


def sample_pairs(records: Iterator[Record], most: int) -> tuple[int, list[Pair]]:
    """Return the number of records, and at most so many pairs drawn at random, in random order (Vitter 1985, algorithm R)."""
    generator, sample, num_records, num_pairs = random.Random(_SEED), [], 0, 0
    for record in records:
        num_records += 1
        if isinstance(record, PairProblem):
            continue
        num_pairs += 1
        if len(sample) < most:
            sample.append(record)
        elif (index := int(generator.random() * num_pairs)) < most:
            sample[index] = record
    generator.shuffle(sample)
    return num_records, sample


def check_sample(source: PairSource, num_records: int, sample: Sequence[Pair]) -> None:
    """Check that a sample of `sample_pairs` holds a pair.

    Raises:
        ValueError: If there is no pair, with the first problem.
    """
    if sample:
        return
    problem = f" in {num_records:,} records. {next(source.read_files()).message}" if num_records else "."
    raise ValueError(f"{source.name} must hold at least one pair, got none{problem}")


class FilterReport:
    """Counts of a run by rule, with the first examples of each. It is kept in the state of a run."""

    def __init__(self, content: dict[str, Any] | None = None):
        """Begin with the content of a stopped run, or with nothing."""
        content = content or {"read": 0, "kept": 0, "dropped": {}, "examples": {}}
        self.num_read, self.num_kept, self.examples = content["read"], content["kept"], content["examples"]
        self.dropped = Counter(content["dropped"])

    def add(self, verdicts: Sequence[tuple[str, Pair]]) -> None:
        """Count verdicts of `PairFilter.decide`."""
        self.num_read += len(verdicts)
        counts = Counter(rule for rule, _ in verdicts)
        self.num_kept += counts.pop("", 0)
        self.dropped += counts
        for rule in counts:
            examples = self.examples.setdefault(rule, [])
            pairs = (pair for name, pair in verdicts if name == rule)
            examples.extend(
                {"source": pair[0], "target": pair[1]} for pair in islice(pairs, NUM_EXAMPLES - len(examples))
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and examples as plain values for JSON, rules in their order."""
        order = [rule for rule in (*PROBLEMS, *RULES) if rule in self.dropped]
        return {
            "read": self.num_read,
            "kept": self.num_kept,
            "dropped": {rule: self.dropped[rule] for rule in order},
            "examples": {rule: self.examples[rule] for rule in order},
        }

    def __str__(self) -> str:
        rows = [(rule, count) for rule, count in self.to_dict()["dropped"].items()] + [("kept", self.num_kept)]
        lines = [f"{name:<20}{count:>12,}{count / max(self.num_read, 1):>9.2%}" for name, count in rows]
        return "\n".join([f"{'rule':<20}{'pairs':>12}{'share':>9}", *lines])


def filter_pairs(
    source: PairSource,
    outputs: Sequence[str | Path],
    settings: FilterSettings,
    *,
    rejected: str | Path | None = None,
    report: str | Path | None = None,
    score_pairs: PairScorer | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    on_start: Callable[[int, int], None] = lambda total, done: None,
    on_chunk: Callable[[int], None] = lambda count: None,
) -> FilterReport:
    """Write the pairs that break no rule.

    Args:
        source: Files with the pairs.
        outputs: One file of pairs, `.tsv` or `.jsonl`, or two text files; each may end in `.gz`.
        settings: The settings.
        rejected: TSV file for the dropped pairs: rule, source, target.
        report: JSON file for the counts and examples.
        score_pairs: As for `PairFilter`.
        shard: Number of the part of the pairs to filter, from 1, and number of parts. Each run learns from all pairs, but knows
            only the duplicates in its part.
        resume: True to continue a stopped run.
        on_start: Is called with the number of pairs, and with that of the pairs that a stopped run has done.
        on_chunk: Is called with a number of pairs that are done.

    Returns:
        The report.

    Raises:
        ImportError: If a package of the extra `filter` is missing.
        ValueError: If settings or files are wrong, or a stopped run had other settings.
    """
    files = {f"output_{number}": Path(path) for number, path in enumerate(outputs)}
    files |= {name: Path(path) for name, path in (("rejected", rejected), ("report", report)) if path is not None}
    stats = [(Path(path).name, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in source.paths]
    key = {"file": stats, "columns": source.columns, "max_line_characters": source.max_line_characters}
    # Names are those of the options, for the error about a stopped run that had other ones.
    values = asdict(settings)
    key |= values.pop("thresholds") | values | {"shard": shard, "output": [str(path) for path in files.values()]}
    key["rules"] = [rule for rule in RULES if rule in settings.rules]
    with WorkFolder(files, key, resume=resume) as folder:
        result = FilterReport(folder.state.get("report"))
        if not folder.state.get("is_finished"):
            pair_filter = PairFilter(source, settings, score_pairs)
            part = shard_range(pair_filter.num_records, shard)
            on_start(len(part), result.num_read)
            records = islice(source.read_files(), part.start + result.num_read, part.stop)
            _filter_chunks(records, pair_filter, folder, result, on_chunk)
            if report is not None:
                folder.append("report", _report_of(result, pair_filter, key).encode("utf-8"))
            folder.save({"report": result.to_dict(), "is_finished": True})
        folder.finish()
    return result


def _filter_chunks(
    records: Iterator[Record],
    pair_filter: PairFilter,
    folder: WorkFolder,
    report: FilterReport,
    on_chunk: Callable[[int], None],
) -> None:
    seen_pairs, seen_sources = (SeenHashes(folder.read(name)) for name in ("pairs", "sources"))
    for name in folder.outputs:
        # An output without pairs is a file, too.
        folder.append(name, b"")
    while chunk := list(islice(records, PAIRS_PER_CHUNK)):
        verdicts, pair_hashes, source_hashes = pair_filter.decide(chunk, seen_pairs, seen_sources)
        report.add(verdicts)
        _append_pairs(folder, [pair for rule, pair in verdicts if not rule])
        if "rejected" in folder.outputs:
            lines = [tsv_line(rule, *pair) for rule, pair in verdicts if rule]
            folder.append("rejected", _as_bytes(lines))
        folder.append("pairs", pair_hashes)
        folder.append("sources", source_hashes)
        folder.save({"report": report.to_dict()})
        on_chunk(len(chunk))


def _append_pairs(folder: WorkFolder, pairs: Sequence[Pair]) -> None:
    if "output_1" in folder.outputs:
        for side in (0, 1):
            folder.append(f"output_{side}", _as_bytes([f"{pair[side].translate(_LINE_BREAKS)}\n" for pair in pairs]))
        return
    is_json = folder.outputs["output_0"].name.removesuffix(".gz").endswith(".jsonl")
    folder.append("output_0", _as_bytes([(json_line if is_json else tsv_line)(*pair) for pair in pairs]))


def _as_bytes(lines: Sequence[str]) -> bytes:
    return "".join(lines).encode("utf-8")


def _report_of(report: FilterReport, pair_filter: PairFilter, key: dict[str, Any]) -> str:
    content: dict[str, Any] = report.to_dict()
    if pair_filter.alignment is not None:
        model = pair_filter.alignment
        content["alignment"] = {"misaligned_share": model.noise_share, "threshold": model.threshold}
    settings = {name: value for name, value in key.items() if name not in ("file", "output")}
    return json_text(content | {"files": [name for name, *_ in key["file"]], "settings": settings})
