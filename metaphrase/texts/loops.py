"""Targets that repeat themselves, and their second generation."""

import re
from collections.abc import Mapping
from dataclasses import replace

from metaphrase.inference.batches import Hypothesis
from metaphrase.inference.generator import EncodedTexts, Generator, Plan

# Tokens of a phrase that a target may not repeat, once it is a loop.
_LOOP_TOKENS = 3
_LOOP = re.compile(r"(\S.{0,79}?)(?:\s*\1){3,}", re.DOTALL)
# Dots and laughter are no loops.
_SHORTEST_LOOP = 12


def find_loop(source: str, target: str) -> str | None:
    """Return a part of a target that follows itself three times or more, if the source has no such part."""
    match = next((match for match in _LOOP.finditer(target) if len(match.group()) >= _SHORTEST_LOOP), None)
    return match.group(1) if match and not _LOOP.search(source) else None


def end_loops(generator: Generator, plan: Plan, encoded: EncodedTexts, hypotheses: list[list[Hypothesis]]) -> None:
    """Replace the hypotheses of sentences whose best target repeats itself, if others do not."""
    sentences = [sentence for document in encoded.documents for sentence in document.sentences]

    def find_looping(rows: Mapping[int, list[Hypothesis]]) -> list[int]:
        targets = generator.tokenizers.decode_targets([best.ids for best, *_ in rows.values()])
        return [i for i, target in zip(rows, targets, strict=True) if find_loop(sentences[i], target)]

    looping = find_looping(dict(enumerate(hypotheses)))
    if not looping:
        return
    again = replace(plan, options=plan.options | {"no_repeat_ngram_size": _LOOP_TOKENS})
    part = EncodedTexts([[ids[i] for i in looping] for ids in encoded.ids], [], {})
    rows = dict(zip(looping, generator.generate_encoded(again, part), strict=True))
    still_looping = find_looping(rows)
    for i in {*looping} - {*still_looping}:
        hypotheses[i], rows[i] = rows[i], hypotheses[i]
    generator.count({"num_loops": len(looping), "num_looping": len(still_looping)})
    # The hypotheses that are left out count no longer.
    generator.count_unfinished(rows.values(), -1)
