"""Judges: scores of single texts by a model or by a function, in place of counts.

Source: Juraska et al. 2023, MetricX-23, https://aclanthology.org/2023.wmt-1.63, and Juraska et al. 2024, MetricX-24,
arXiv 2410.03983.
"""

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metaphrase.analysis.reading import first_logits
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.metrics import Ratio, SegmentStatistics
from metaphrase.inference import Generator
from metaphrase.storage.folders import read_fields

# The logit of this token is the score, an error from 0 to 25.
_TOKEN, _MOST = "<extra_id_10>", 25.0
# Prompts with and without a reference, and the most tokens, by the year of the model.
_PROMPTS = {
    "23": ("candidate: {target} reference: {reference}", "candidate: {target} source: {source}", 1024),
    "24": (
        "source: {source} candidate: {target} reference: {reference}",
        "source: {source} candidate: {target}",
        1536,
    ),
}


class Judge(NamedTuple):
    """A score of single texts by its name. `score` takes sources, targets, and references or None, and returns numbers."""

    name: str
    score: Callable[[Sequence[str], Sequence[str], Sequence[str] | None], Sequence[float]]
    is_better_lower: bool

    def segments(
        self, sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None
    ) -> SegmentStatistics:
        """Return the statistics of a corpus, whose score is the mean. Refuse a wrong number of scores, and infinite ones."""
        scores = [float(value) for value in self.score(sources, targets, references)]
        if len(scores) != len(targets):
            raise MetaphraseError(f"`metric` {self.name} must return {len(targets)} scores, got {len(scores)}.")
        for number, value in enumerate(scores, start=1):
            if not math.isfinite(value):
                raise MetaphraseError(f"`metric` {self.name} must return finite scores, got {value} for text {number}.")
        return SegmentStatistics(Ratio(1.0), [(value, 1) for value in scores], f"mean|judge:{self.name}")


def load_judge(name: str, **loading: Any) -> Judge:
    """Return a judge: `package.module:function`, or a folder or Hub id of a MetricX model with its tokenizer.

    A function takes sources, targets and references, and returns a number for each; more is better, unless it has an attribute
    `lower_is_better`. A model is read by the prompts of 2024, or of 2023 if its name or origin has metricx-23. More is worse.
    """
    if ":" in name and not Path(name).exists():
        module, _, function_name = name.partition(":")
        # The installed command does not look for modules in this folder.
        sys.path.append(os.getcwd())
        try:
            function = getattr(importlib.import_module(module), function_name)
        except (ImportError, AttributeError) as error:
            raise MetaphraseError(f"`metric` must name a module and its function, got {name!r}: {error}.") from error
        return Judge(function_name, function, bool(getattr(function, "lower_is_better", False)))
    generator = Generator.from_pretrained(name, engine="torch", **loading)
    token = generator.tokenizers.source.convert_tokens_to_ids(_TOKEN)
    if token in (None, generator.tokenizers.source.unk_token_id):
        raise MetaphraseError(f"`metric` must be a MetricX model, whose tokenizer has {_TOKEN}, got {name!r}.")
    origin = (read_fields(Path(name) / "conversion.json") or {}).get("source", "")
    is_early = re.search(r"metricx[-_]?23", f"{Path(name).name} {origin}", re.IGNORECASE)
    with_reference, without, most = _PROMPTS["23" if is_early else "24"]

    def score(sources: Sequence[str], targets: Sequence[str], references: Sequence[str] | None) -> list[float]:
        prompt = without if references is None else with_reference
        rows = zip(sources, targets, references or targets, strict=True)
        texts = [prompt.format(source=row[0], target=row[1], reference=row[2]) for row in rows]
        # MetricX reads no end of sequence.
        ids = [row[:-1][: most - 1] for row in generator.encode_uncut(texts)]
        logits = first_logits(generator, ids, [token], show_progress=None)
        return [min(max(float(value), 0.0), _MOST) for value in logits[:, 0]]

    return Judge(Path(name).resolve().name, score, True)
