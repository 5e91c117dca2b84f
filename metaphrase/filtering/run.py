"""A run of all rules over the pairs of a corpus, chunk by chunk, which can be killed and resumed."""

import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from metaphrase.data.pairs import PROBLEMS, SIDES, WEIGHT_COLUMN, PairProblem, PairSource, Record
from metaphrase.errors import MetaphraseError
from metaphrase.filtering.alignment import MAX_PAIRS, MIN_PAIRS, AlignmentModel
from metaphrase.filtering.rules import RULES, FilterSettings, Pair, PairRules, load_detector, normalize
from metaphrase.inference.line_files import as_lines
from metaphrase.inference.progress import progress_bar
from metaphrase.storage.folders import file_in_one_step, json_text, read_fields, write_json, write_lock
from metaphrase.tokenization.texts import shard_range

logger = logging.getLogger(__name__)

PAIRS_PER_CHUNK = 10_000
# Models take so much longer that a run would lose much work.
_PAIRS_PER_CHUNK_OF_MODELS = 1000
NUM_EXAMPLES = 5
_SEED = 0
_STATE = "state.json"
_HASHES = "pairs", "sources"
_TSV_BREAKS = str.maketrans("\t\r\n", "   ")
# Functions by rule, which return True for each pair that breaks the rule.
ModelRules = Mapping[str, Callable[[Sequence[Pair]], Iterable[bool]]]
# The broken rule, or an empty text, and the pair.
Verdict = tuple[str, Pair]


def add_texts(texts: Iterable[str], runs: list[np.ndarray], most: int) -> tuple[np.ndarray, bytes]:
    """Return True for each text that occurred fewer than `most` times, here or in earlier calls, and the hashes of these texts.

    The hashes have 8 bytes and stand in memory, as sorted runs. A new run is merged with runs of its size or less, so that a
    look-up takes a binary search in each of the few runs.
    """
    digests = (hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest() for text in texts)
    hashes = np.frombuffer(b"".join(digests), dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    counts = np.arange(len(hashes)) - np.searchsorted(ordered, ordered)
    for run in runs:
        counts += np.searchsorted(run, ordered, side="right") - np.searchsorted(run, ordered)
    is_new = np.empty(len(hashes), dtype=bool)
    is_new[order] = counts < most
    run = ordered[counts < most]
    while runs and len(runs[-1]) <= len(run):
        # The stable sort merges two sorted halves in linear time.
        run = np.sort(np.concatenate([runs.pop(), run]), kind="stable")
    runs.append(run)
    return is_new, hashes[is_new].tobytes()


def tsv_line(*values: Any) -> str:
    """Return a line of a .tsv file. Tabs and line breaks inside a text become spaces."""
    return "\t".join(str(value).translate(_TSV_BREAKS) for value in values) + "\n"


def pair_formatter(output: str | None, names: Sequence[str] = SIDES) -> Callable[..., str]:
    """Return the function that formats values for a file, .tsv or .jsonl; `None` is standard output, which takes tabs."""
    if output is not None and not output.endswith((".tsv", ".jsonl")):
        raise MetaphraseError(f"`output` must end in .tsv or .jsonl, got {output!r}.")
    if output is None or output.endswith(".tsv"):
        return tsv_line
    return lambda *values: json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False) + "\n"


class PairFilter:
    """All rules, prepared for one corpus of `num_records`. `alignment` is the model of this rule; None if the rule is off."""

    def __init__(self, source: PairSource, settings: FilterSettings, model_rules: ModelRules):
        """Read the corpus once and learn from a sample of it. Rules by models are off, unless `model_rules` has them."""
        self._settings, self._model_rules = settings, model_rules
        self._active = set(RULES if settings.rules is None else settings.rules)
        has_language = "language" in self._active and (settings.source_lang, settings.target_lang) != (None, None)
        self._is_foreign = load_detector(settings) if has_language else None
        # Packages that are missing must show before the corpus is read.
        PairRules(settings, ())
        self.num_records, sample = sample_pairs(source.records(), MAX_PAIRS, source.name)
        if settings.normalize:
            sample = [(normalize(first), normalize(second)) for first, second in sample]
        self._rules = PairRules(settings, sample)
        self.alignment, usable = None, {}
        for pair in sample if "alignment" in self._active else ():
            rule, forms = self._rules.broken_rule(*pair)
            if not rule:
                usable.setdefault(forms, pair)
        if len(usable) >= MIN_PAIRS:
            self.alignment = AlignmentModel(list(usable.values()), _SEED)
        elif "alignment" in self._active:
            logger.info("The rule `alignment` is off: it needs %d pairs, got %d.", MIN_PAIRS, len(usable))

    def decide(
        self, records: Sequence[Record], pair_runs: list[np.ndarray], source_runs: list[np.ndarray]
    ) -> tuple[list[Verdict], bytes, bytes]:
        """Return the verdict of each record, and the new hashes of pairs and of sources, which the runs get (see `add_texts`)."""
        settings, verdicts = self._settings, []
        # Normal forms of the pairs that stay, by their indices.
        forms_of: dict[int, Pair] = {}
        for index, record in enumerate(records):
            if isinstance(record, PairProblem):
                verdicts.append((record.kind, (record.message, "")))
                continue
            pair = (normalize(record[0]), normalize(record[1])) if settings.normalize else tuple(record[:2])
            rule, forms = self._rules.broken_rule(*pair)
            verdicts.append((rule, pair))
            if not rule:
                forms_of[index] = forms

        def pairs() -> list[Pair]:
            return [verdicts[index][1] for index in forms_of]

        def drop(rule: str, is_broken: Iterable[bool]) -> None:
            for index in list(itertools.compress(list(forms_of), is_broken)):
                verdicts[index] = rule, verdicts[index][1]
                del forms_of[index]

        def drop_repeated(rule: str, texts: Iterable[str], most: int, runs: list[np.ndarray]) -> bytes:
            if rule not in self._active:
                return b""
            is_new, hashes = add_texts(texts, runs, most)
            drop(rule, ~is_new)
            return hashes

        compared = forms_of.values() if settings.duplicates == "near" else pairs()
        pair_hashes = drop_repeated("duplicate", map("\t".join, compared), 1, pair_runs)
        if self._is_foreign is not None:
            drop("language", itertools.starmap(self._is_foreign, pairs()))
        if self.alignment is not None:
            drop("alignment", self.alignment.scores(pairs()) < self.alignment.threshold)
        for rule, are_broken in self._model_rules.items():
            if forms_of:
                drop(rule, are_broken(pairs()))
        sources = [source for source, _ in pairs()]
        most = settings.max_targets_per_source
        return verdicts, pair_hashes, drop_repeated("targets_per_source", sources, most, source_runs)


def sample_pairs(records: Iterable[Record], most: int, name: str = "The corpus") -> tuple[int, list[Pair]]:
    """Return the number of records, and at most so many pairs drawn at random, in random order (Vitter 1985, algorithm R).

    The pairs have no weights.

    Raises:
        MetaphraseError: If there is no pair. The message has the name and the first problem.
    """
    generator, sample, problem, num_records, num_pairs = random.Random(_SEED), [], "", 0, 0
    for record in records:
        num_records += 1
        if isinstance(record, PairProblem):
            problem = problem or f" {record.message}"
            continue
        num_pairs += 1
        if len(sample) < most:
            sample.append(record[:2])
        elif (index := int(generator.random() * num_pairs)) < most:
            sample[index] = record[:2]
    if not sample:
        raise MetaphraseError(f"{name} must hold at least one pair, got none in {num_records:,} records.{problem}")
    generator.shuffle(sample)
    return num_records, sample


def count_verdicts(report: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """Add verdicts to a report, which has counts by rule and the first examples of each, rules in their order."""
    report["read"] += len(verdicts)
    report["kept"] += sum(not rule for rule, _ in verdicts)
    for rule, (source, target) in verdicts:
        if rule:
            report["dropped"][rule] = report["dropped"].get(rule, 0) + 1
            if len(examples := report["examples"].setdefault(rule, [])) < NUM_EXAMPLES:
                examples.append({"source": source, "target": target})
    for name in ("dropped", "examples"):
        report[name] = {rule: report[name][rule] for rule in (*PROBLEMS, *RULES) if rule in report[name]}


def format_report(report: Mapping[str, Any]) -> str:
    """Return the table of a report."""
    rows = [*report["dropped"].items(), ("kept", report["kept"])]
    lines = [f"{name:<20}{count:>12,}{count / max(report['read'], 1):>9.2%}" for name, count in rows]
    return "\n".join([f"{'rule':<20}{'pairs':>12}{'share':>9}", *lines])


class WorkFolder:
    """Folder `OUTPUT.partial` with the files of an unfinished run, and the last saved `state`, which says how far they go.

    A run appends to the files and then saves the state. A resumed run first cuts off what was appended after the state.
    """

    def __init__(self, outputs: Mapping[str, Path], key: Mapping[str, Any], *, resume: bool):
        """Read the state of a stopped run, which must have the same `key`. Nothing is written."""
        self.outputs, self._key = dict(outputs), json.loads(json.dumps(key))
        self.path = partial_path(next(iter(self.outputs.values())))
        saved = read_fields(self.path / _STATE)
        # The first state may have been cut short under its temporary name.
        names = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        if saved is None and not all(name.startswith(".") for name in names):
            raise MetaphraseError(
                f"`output` must leave the name {self.path.name} to the run, got a folder of that name that no run has written. "
                "Choose another output."
            )
        saved = (saved if resume else None) or {"key": self._key, "sizes": {}, "state": {}}
        if saved["key"] != self._key:
            name = next((name for name, value in self._key.items() if saved["key"].get(name) != value), "resume")
            raise MetaphraseError(
                f"`{name}` must be {saved['key'].get(name)!r} as in the stopped run in {self.path}, got {self._key.get(name)!r}. "
                "Repeat the command of that run, or pass --overwrite to start again."
            )
        self.state: dict[str, Any] = saved["state"]
        self._sizes: dict[str, int] = saved["sizes"]

    def cut_files(self) -> None:
        """Cut off what was appended after the state, and make the files, of which some may stay empty."""
        for name, size in self._sizes.items():
            if not (self.path / name).exists() or (self.path / name).stat().st_size < size:
                # The machine stopped before its disk had everything.
                raise MetaphraseError(f"{self.path / name} must have at least {size} bytes. --overwrite starts again.")
        for path in self.path.iterdir():
            if path.name != _STATE:
                os.truncate(path, self._sizes.get(path.name, 0))
        # Marks the folder of a run.
        self.save(self.state)
        for name in {*self.outputs, *_HASHES} - self._sizes.keys():
            self.append(name, b"")

    def append(self, name: str, content: bytes) -> None:
        """Append to an output, which is compressed if its path ends in .gz, or to a file of the run itself."""
        if name in self.outputs and self.outputs[name].name.endswith(".gz"):
            # A gzip file may have any number of members. Without a time, equal content has equal bytes.
            content = gzip.compress(content, mtime=0)
        with open(self.path / name, "ab") as file:
            file.write(content)
            self._sizes[name] = file.tell()

    def save(self, state: Mapping[str, Any]) -> None:
        with file_in_one_step(self.path / _STATE) as temporary:
            write_json(temporary, {"key": self._key, "sizes": self._sizes, "state": state})
        self.state = dict(state)

    def finish(self) -> None:
        """Give the outputs their names and remove the folder. The saved state must have `is_finished`."""
        for name, path in self.outputs.items():
            # A run that was killed here has moved some of them.
            if (self.path / name).exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.path / name, path)
        # The state goes last, so that a run which is killed here can be resumed.
        for path in self.path.iterdir():
            if path.name != _STATE:
                path.unlink()
        shutil.rmtree(self.path)


def partial_path(output: Path) -> Path:
    """Return the folder of an unfinished run."""
    return output.with_name(output.name + ".partial")


def filter_pairs(
    source: PairSource,
    outputs: Sequence[str | Path],
    settings: FilterSettings,
    *,
    rejected: str | Path | None = None,
    report: str | Path | None = None,
    model_rules: ModelRules | None = None,
    weigh: Callable[[Sequence[Pair]], Iterable[float]] | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    show_progress: bool | None = False,
) -> dict[str, Any]:
    """Write the pairs that break no rule, and return the report of `count_verdicts`.

    Args:
        outputs: One file of pairs, `.tsv` or `.jsonl`, with their weights, or two text files; each may end in `.gz`.
        rejected: TSV file for the dropped pairs: rule, source, target.
        weigh: Function that returns the factor of the weight of each pair, which the file of pairs gets.
        shard: Number of the part of the pairs to filter, from 1, and number of parts. Each run learns from all pairs, but knows
            only the duplicates in its part.
    """
    files = {f"output_{number}": Path(path) for number, path in enumerate(outputs)}
    files |= {name: Path(path) for name, path in (("rejected", rejected), ("report", report)) if path is not None}
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in map(Path, source.paths)]
    # Names are those of the options, for the error about a stopped run that had other ones.
    key = asdict(settings) | {"rules": [rule for rule in RULES if settings.rules is None or rule in settings.rules]}
    key |= {"shard": shard, "columns": source.columns, "max_line_characters": source.max_line_characters}
    identity = {"file": stats, "output": [str(path) for path in files.values()]}
    folder = WorkFolder(files, key | identity, resume=resume)
    result = folder.state.get("report") or {"read": 0, "kept": 0, "dropped": {}, "examples": {}}
    pair_filter = None if folder.state.get("is_finished") else PairFilter(source, settings, model_rules or {})
    folder.path.mkdir(parents=True, exist_ok=True)
    with write_lock(folder.path, "output"):
        if pair_filter is not None:
            folder.cut_files()
            part = shard_range(pair_filter.num_records, shard)
            if result["read"]:
                logger.info("Resuming %s at pair %d.", outputs[0], result["read"] + 1)
            is_parallel = len(outputs) == 2
            names = (*SIDES, WEIGHT_COLUMN)[: len(source.columns) if weigh is None else 3]
            format_pair = tsv_line if is_parallel else pair_formatter(files["output_0"].name.removesuffix(".gz"), names)
            runs = [[np.sort(np.fromfile(folder.path / name, dtype=np.uint64))] for name in _HASHES]
            records = itertools.islice(source.records(), part.start + result["read"], part.stop)
            with progress_bar(len(part), "pairs", show_progress, result["read"]) as bar:
                size = _PAIRS_PER_CHUNK_OF_MODELS if model_rules else PAIRS_PER_CHUNK
                while chunk := list(itertools.islice(records, size)):
                    verdicts, *hashes = pair_filter.decide(chunk, *runs)
                    count_verdicts(result, verdicts)
                    decided = zip(chunk, verdicts, strict=True)
                    # The last value is a weight.
                    pairs = [(*pair, *record[2:]) for record, (rule, pair) in decided if not rule]
                    if weigh is not None and pairs:
                        factors = weigh([pair[:2] for pair in pairs])
                        weighted = zip(pairs, factors, strict=True)
                        pairs = [(*pair[:2], float(factor) * math.prod(pair[2:])) for pair, factor in weighted]
                    lines = {"output_0": "".join(itertools.starmap(format_pair, pairs))}
                    if is_parallel:
                        lines = {f"output_{side}": as_lines(pair[side] for pair in pairs) for side in (0, 1)}
                    if rejected is not None:
                        lines["rejected"] = "".join(tsv_line(rule, *pair) for rule, pair in verdicts if rule)
                    for name, text in lines.items():
                        folder.append(name, text.encode("utf-8"))
                    for name, content in zip(_HASHES, hashes, strict=True):
                        folder.append(name, content)
                    folder.save({"report": result})
                    bar.update(len(chunk))
            if report is not None:
                content = result | {"files": [name for name, *_ in stats], "settings": key}
                if pair_filter.alignment is not None:
                    model = pair_filter.alignment
                    content["alignment"] = {"misaligned_share": model.noise_share, "threshold": model.threshold}
                folder.append("report", json_text(content).encode("utf-8"))
            folder.save({"report": result, "is_finished": True})
        folder.finish()
    return result
