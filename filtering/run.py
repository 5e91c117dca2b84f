"""A run of all rules over the pairs of a corpus, chunk by chunk, which can be killed and resumed."""

import contextlib
import gzip
import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from metaphrase.data.pairs import PROBLEMS, PairProblem, PairSource, Record, json_line, tsv_line
from metaphrase.filtering.alignment import MAX_PAIRS, MIN_PAIRS, AlignmentModel
from metaphrase.filtering.rules import (
    RULES,
    CorpusFacts,
    LanguageRule,
    Pair,
    PairRules,
    SeenHashes,
    Thresholds,
    hash_text,
    normal_forms,
    normalize,
)
from metaphrase.storage.folders import WriteLock, file_in_one_step, json_text, read_fields, write_json
from metaphrase.tokenization.texts import shard_range

logger = logging.getLogger(__name__)

_STATE = "state.json"


class WorkFolder(contextlib.AbstractContextManager):
    """Folder `OUTPUT.partial` with the files of an unfinished run and a state that says how far they go.

    A run appends to the files and then saves the state. A resumed run first cuts off what was appended after the state.

    Attributes:
        outputs: Final path of each output by name.
        state: The last state that was saved; empty at the beginning.
    """

    def __init__(self, outputs: Mapping[str, Path], key: Mapping[str, Any], *, resume: bool):
        """Make the folder, or open that of a stopped run.

        Args:
            outputs: Final path of each output by name.
            key: Settings and input of the run, as values of JSON. A stopped run must have the same.
            resume: True to continue a stopped run, False to start again.

        Raises:
            ValueError: If the stopped run had another key, another run is writing, or no run has written the folder.
        """
        self.outputs, self._key = dict(outputs), json.loads(json.dumps(key))
        self.path = partial_path(next(iter(self.outputs.values())))
        self._refuse_foreign_folder()
        if not resume and self.path.exists():
            WriteLock(self.path, "output").release()
            self._remove()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = WriteLock(self.path, "output")
        saved = read_fields(self.path / _STATE) or {}
        if saved and saved["key"] != self._key:
            self._lock.release()
            name = next((name for name, value in self._key.items() if saved["key"].get(name) != value), "resume")
            raise ValueError(
                f"`{name}` must be {saved['key'].get(name)!r} as in the stopped run in {self.path}, got {self._key.get(name)!r}. "
                "Repeat the command of that run, or pass --overwrite to start again."
            )
        self.state: dict[str, Any] = saved.get("state", {})
        self._sizes: dict[str, int] = saved.get("sizes", {})
        if not saved:
            with contextlib.ExitStack() as failed:
                failed.callback(self._lock.release)
                # The mark of a run's folder.
                self.save({})
                failed.pop_all()
        if not self.state.get("is_finished"):
            self._cut_files()

    def _cut_files(self) -> None:
        """Cut off what was appended after the state."""
        paths = {path.name: path for path in self.path.iterdir() if path.name != _STATE}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        for name, size in self._sizes.items():
            if sizes.get(name, 0) < size:
                self._lock.release()
                # The machine stopped before its disk had everything.
                raise ValueError(
                    f"{self.path / name} must have at least {size} bytes to go on, got {sizes.get(name, 0)}. Pass --overwrite "
                    "to start again."
                )
        for name, path in paths.items():
            os.truncate(path, self._sizes.get(name, 0))

    def _remove(self) -> None:
        """Remove the folder, and last its mark, so that a killed removal leaves the folder of a run."""
        for path in self.path.iterdir():
            if path.name != _STATE:
                path.unlink()
        shutil.rmtree(self.path)

    def _refuse_foreign_folder(self) -> None:
        """Refuse a folder that no run has written: a run empties or removes the files of its folder."""
        files = self.path.iterdir() if self.path.exists() else ()
        if not (self.path / _STATE).is_file() and any(not path.name.startswith(".") for path in files):
            raise ValueError(
                f"`output` must leave the name {self.path.name} to the run, got a folder of that name that no run has written. "
                "Choose another output."
            )

    def __exit__(self, *exception: object) -> None:
        if isinstance(exception[1], Exception) and not self.state:
            # A run that was refused, for example because a package is missing, has nothing to resume.
            self._remove()
        self._lock.release()

    def append(self, name: str, content: bytes) -> None:
        """Append to a file: an output, or a file of the run itself. Output whose path ends in .gz is compressed."""
        if name in self.outputs and self.outputs[name].name.endswith(".gz") and content:
            # A gzip file may have any number of members. Without a time, equal content has equal bytes.
            content = gzip.compress(content, mtime=0)
        with open(self.path / name, "ab") as file:
            file.write(content)
            self._sizes[name] = file.tell()

    def read(self, name: str) -> bytes:
        """Return the content of a file of the run itself; nothing if there is none."""
        path = self.path / name
        return path.read_bytes() if path.exists() else b""

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the state, which belongs to all that was appended so far."""
        with file_in_one_step(self.path / _STATE) as temporary:
            write_json(temporary, {"key": self._key, "sizes": self._sizes, "state": state})
        self.state = dict(state)

    def finish(self) -> None:
        """Give the outputs their names and remove the folder. The saved state must have `is_finished`."""
        for name, path in self.outputs.items():
            # A run that was killed here has moved some of them.
            if (self.path / name).exists():
                if path.name.endswith(".gz") and not (self.path / name).stat().st_size:
                    (self.path / name).write_bytes(gzip.compress(b"", mtime=0))
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.path / name, path)
        self._remove()


def partial_path(output: Path) -> Path:
    """Return the folder of an unfinished run."""
    return output.with_name(output.name + ".partial")


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
