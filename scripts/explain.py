"""`metaphrase explain MODEL`: show what each stage of a model computes for a pair, as a page or as text."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import set_seed

from metaphrase.hub_card import write_explanation_page
from metaphrase.hub_card.figures import spell_out
from metaphrase.hub_card.pages import check_pairs
from metaphrase.inference import Explanation, Generator, explain
from metaphrase.inference.line_files import check_files
from metaphrase.scripts.generate import warn_of_lengths
from metaphrase.scripts.parsers import (
    chosen_generation_options,
    chosen_loading_options,
)

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = "explanation.html"
SHADES = " ░▒▓█"
MAX_ROWS, MAX_COLUMNS = 24, 100
_CUT = f"; the first {MAX_ROWS} rows and {MAX_COLUMNS} columns"


def main(arguments: argparse.Namespace) -> None:
    targets = arguments.target or [None] * len(arguments.source)
    if len(targets) != len(arguments.source):
        raise ValueError(f"`source` and `target` must be equally many, got {len(arguments.source)} and {len(targets)}.")
    check_pairs(len(targets))
    output = arguments.output or (None if arguments.text else DEFAULT_OUTPUT)
    check_files({}, output, models=[arguments.model])
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(arguments.model, **chosen_loading_options(arguments))
    options = chosen_generation_options(arguments) | {"seed": arguments.seed}
    pairs = zip(arguments.source, targets, strict=True)
    explanations = [explain(generator, source, target, **options) for source, target in pairs]
    warn_of_lengths(generator, len(targets))
    if arguments.text:
        for explanation in explanations:
            print("\n".join(describe(explanation)))
    if output is not None:
        name = Path(arguments.model).resolve().name if Path(arguments.model).is_dir() else arguments.model
        write_explanation_page(explanations, output, title=f"Explanation of {name}")
        logger.info("Written to %s", output)


def describe(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation for a terminal. Control characters and marks of direction are spelled out."""
    for lines in (_tokens, _shapes, _positions, _masks, _attention, _labels, _steps, _beam):
        yield from (spell_out(line, ("Cc", "Cf", "Cs", "Zl", "Zp")) for line in lines(explanation))
        yield ""
    yield from explanation.notes


def _tokens(explanation: Explanation) -> Iterator[str]:
    yield "TOKENS: token and id"
    target = "target (generated)" if explanation.is_generated else "target (given)"
    sides = explanation.source_tokens, explanation.decoder_tokens, explanation.target_tokens
    for name, side in zip(("source", "decoder input", target), sides, strict=True):
        pairs = zip(side.tokens, side.ids, strict=True)
        yield f"{name}: " + "  ".join(f"{token} {index}" for token, index in pairs)


def _shapes(explanation: Explanation) -> Iterator[str]:
    yield "SHAPES: output of each module, first layers only"
    width = max((len(stage.name) for stage in explanation.stages), default=0)
    for stage in explanation.stages:
        yield f"{stage.name:<{width}}  {' x '.join(map(str, stage.shape))}"


def _positions(explanation: Explanation) -> Iterator[str]:
    yield f"POSITION ENCODINGS: magnitudes from '{SHADES[0]}' (0) to '{SHADES[-1]}' (the largest){_CUT}"
    for item in explanation.positions:
        largest = float(np.abs(item.values).max()) or 1.0
        yield f"{item.name} ({item.kind}{' of head 0' if item.kind == 'bias' else ''}), largest {largest:.3g}"
        for row in item.values[0][:MAX_ROWS, :MAX_COLUMNS]:
            yield "  " + "".join(SHADES[round(abs(value) / largest * (len(SHADES) - 1))] for value in row.tolist())


def _masks(explanation: Explanation) -> Iterator[str]:
    yield f"MASKS: rows are queries, columns are keys; # may read, . may not{_CUT}"
    for name, mask in explanation.masks.items():
        yield f"{name}:"
        yield from (
            "  " + "".join(".#"[cell] for cell in row) for row in mask[:MAX_ROWS, :MAX_COLUMNS].astype(int).tolist()
        )


def _attention(explanation: Explanation) -> Iterator[str]:
    yield "ATTENTION: mean of the heads of the last layer, the three largest shares of each query"
    sides = {
        "encoder": (explanation.source_tokens, explanation.source_tokens),
        "decoder": (explanation.decoder_tokens, explanation.decoder_tokens),
        "cross": (explanation.target_tokens, explanation.source_tokens),
    }
    for name, weights in explanation.attentions.items():
        queries, keys = sides[name]
        yield f"{name}:"
        for token, row in zip(queries.tokens, weights[-1].mean(axis=0), strict=True):
            best = row.argsort()[::-1][:3]
            yield f"  {token} <- " + ", ".join(f"{keys.tokens[key]} {100 * row[key]:.0f} %" for key in best)


def _labels(explanation: Explanation) -> Iterator[str]:
    yield f"TEACHER FORCING: decoder input -> label, probability and rank; mean loss {explanation.loss:.4f} nats"
    sides = explanation.decoder_tokens.tokens, explanation.target_tokens.tokens
    rows = zip(*sides, explanation.probabilities, explanation.ranks, strict=True)
    yield from (f"  {token} -> {label}  {100 * value:.2f} %  rank {rank}" for token, label, value, rank in rows)
    yield "  (padding) -> -100  ignored"


def _steps(explanation: Explanation) -> Iterator[str]:
    yield "NEXT TOKENS: the most probable at each step; * on the path, b of beam search, k and p remain with top-k and top-p"
    for name, steps in explanation.paths.items():
        yield f"path {name}:"
        for number, step in enumerate(steps, start=1):
            shown = []
            for index, (token, share) in enumerate(zip(step.tokens, step.probabilities, strict=True)):
                marks = "*" * (step.ids[index] == step.choice) + "b" * (step.ids[index] == step.beam_choice)
                marks += "k" * (step.top_k.probabilities[index] > 0) + "p" * (step.top_p.probabilities[index] > 0)
                shown.append(f"{token} {100 * share:.1f} %" + (f" [{marks}]" if marks else ""))
            yield f"  {number}: " + ", ".join(shown)
            yield f"     top-k draws {step.top_k.token}, top-p draws {step.top_p.token}"


def _beam(explanation: Explanation) -> Iterator[str]:
    tree = explanation.beam_tree
    yield f"BEAM SEARCH with {tree.num_beams} beams: each candidate behind its hypothesis, with the sum of log-probabilities"
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(index)
    open_nodes = children.get(None, [])[::-1]
    while open_nodes:
        index = open_nodes.pop()
        node = tree.nodes[index]
        result = f", result {node.rank} with score {node.score:.4f}" if node.rank else ""
        yield f"  {'| ' * node.step}{node.token}  {node.total:.3f} {node.state}{result}"
        open_nodes += children.get(index, [])[::-1]
