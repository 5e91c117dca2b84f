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
from metaphrase.scripts.parsers import chosen_generation_options, chosen_loading_options

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
    for title, lines in _sections(explanation).items():
        yield title
        yield from (spell_out(line, ("Cc", "Cf", "Cs", "Zl", "Zp")) for line in lines)
        yield ""
    yield from explanation.notes


def _sections(shown: Explanation) -> dict[str, list[str]]:
    """Return the lines of each section by its title."""
    source, decoder, target = shown.source_tokens, shown.decoder_tokens, shown.target_tokens
    width = max((len(stage.name) for stage in shown.stages), default=0)
    maps = {"encoder": (source, source), "decoder": (decoder, decoder), "cross": (target, source)}
    positions, attention, steps = [], [], []
    for item in shown.positions:
        largest = float(np.abs(item.values).max()) or 1.0
        positions.append(
            f"{item.name} ({item.kind}{' of head 0' if item.kind == 'bias' else ''}), largest {largest:.3g}"
        )
        for row in np.rint(np.abs(_cut(item.values[0])) / largest * (len(SHADES) - 1)).astype(int):
            positions.append("  " + "".join(SHADES[shade] for shade in row))
    for name, weights in shown.attentions.items():
        attention.append(f"{name}:")
        for token, row in zip(maps[name][0].tokens, weights[-1].mean(axis=0), strict=True):
            best = (f"{maps[name][1].tokens[key]} {100 * row[key]:.0f} %" for key in row.argsort()[::-1][:3])
            attention.append(f"  {token} <- {', '.join(best)}")
    for name, path in shown.paths.items():
        steps.append(f"path {name}:")
        for number, step in enumerate(path, start=1):
            tokens = []
            for index, (token, share) in enumerate(zip(step.tokens, step.probabilities, strict=True)):
                marks = "*" * (step.ids[index] == step.choice) + "b" * (step.ids[index] == step.beam_choice)
                marks += "k" * (step.top_k.probabilities[index] > 0) + "p" * (step.top_p.probabilities[index] > 0)
                tokens.append(f"{token} {100 * share:.1f} %" + (f" [{marks}]" if marks else ""))
            steps += [f"  {number}: {', '.join(tokens)}"]
            steps += [f"     top-k draws {step.top_k.token}, top-p draws {step.top_p.token}"]
    labels = zip(decoder.tokens, target.tokens, shown.probabilities, shown.ranks, strict=True)
    sides = {"source": source, "decoder input": decoder}
    sides["target (generated)" if shown.is_generated else "target (given)"] = target
    return {
        "TOKENS: token and id": [
            f"{name}: " + "  ".join(f"{token} {index}" for token, index in zip(side.tokens, side.ids, strict=True))
            for name, side in sides.items()
        ],
        "SHAPES: output of each module, first layers only": [
            f"{stage.name:<{width}}  {' x '.join(map(str, stage.shape))}" for stage in shown.stages
        ],
        f"POSITION ENCODINGS: magnitudes from '{SHADES[0]}' (0) to '{SHADES[-1]}' (the largest){_CUT}": positions,
        f"MASKS: rows are queries, columns are keys; # may read, . may not{_CUT}": [
            line
            for name, mask in shown.masks.items()
            for line in (f"{name}:", *("  " + "".join(".#"[int(cell)] for cell in row) for row in _cut(mask)))
        ],
        "ATTENTION: mean of the heads of the last layer, the three largest shares of each query": attention,
        f"TEACHER FORCING: decoder input -> label, probability and rank; mean loss {shown.loss:.4f} nats": [
            *(f"  {token} -> {label}  {100 * value:.2f} %  rank {rank}" for token, label, value, rank in labels),
            "  (padding) -> -100  ignored",
        ],
        "NEXT TOKENS: the most probable at each step; * on the path, b of beam search, k and p: in top-k and top-p": steps,
        f"BEAM SEARCH with {shown.beam_tree.num_beams} beams: each candidate behind its hypothesis, with the sum of "
        "log-probabilities": _tree_lines(shown),
    }


def _cut(values: np.ndarray) -> np.ndarray:
    return values[:MAX_ROWS, :MAX_COLUMNS]


def _tree_lines(explanation: Explanation) -> list[str]:
    """Return the lines of the beam search's candidates, each with those behind it."""
    nodes, children, lines = explanation.beam_tree.nodes, {}, []
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).insert(0, index)
    waiting = list(children.get(None, []))
    while waiting:
        index = waiting.pop()
        node = nodes[index]
        result = f", result {node.rank} with score {node.score:.4f}" if node.rank else ""
        lines.append(f"  {'| ' * node.step}{node.token}  {node.total:.3f} {node.state}{result}")
        waiting += children.get(index, [])
    return lines
