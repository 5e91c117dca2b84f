"""`metaphrase explain MODEL` and `metaphrase attention MODEL`: show what a model computes for a pair."""

import argparse
import logging
from pathlib import Path

from transformers import set_seed

from metaphrase.analysis.pages import draw_attention_map, write_explanation_page
from metaphrase.analysis.scoring import read_texts
from metaphrase.errors import MetaphraseError
from metaphrase.inference import AttentionMap, Generator, cross_attentions, explain, format_pharaoh, word_alignment
from metaphrase.inference.batches import numbering
from metaphrase.inference.line_files import OutputFile, check_files
from metaphrase.scripts.parsers import chosen_generation_options, chosen_loading_options, given_options
from metaphrase.tokenization import iterate_lines

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    sources, targets = read_texts(arguments.source, arguments.target or [None] * len(arguments.source))
    check_files({}, arguments.output)
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(arguments.model, **chosen_loading_options(arguments))
    options = chosen_generation_options(arguments) | {"seed": arguments.seed}
    explanations = [explain(generator, *pair, **options) for pair in zip(sources, targets, strict=True)]
    generator.log_counts(len(targets))
    name = Path(arguments.model).resolve().name if Path(arguments.model).is_dir() else arguments.model
    write_explanation_page(explanations, arguments.output, title=f"Explanation of {name}")
    logger.info("Written to %s", arguments.output)


# A word alignment goes to standard output by default.
DEFAULT_OUTPUTS = {"png": "attention.png", "pharaoh": None}
SENTENCES_AT_A_TIME = 1024


def attention(arguments: argparse.Namespace) -> None:
    """Run `metaphrase attention MODEL`: show cross-attention as a picture or a word alignment."""
    form = arguments.format or ("pharaoh" if Path(arguments.output or "").suffix in (".align", ".txt") else "png")
    output = arguments.output or DEFAULT_OUTPUTS[form]
    check_files(given_options(arguments, ("input", "target_input")), output)
    sources = list(arguments.source or iterate_lines(arguments.input, arguments.max_line_characters))
    targets = arguments.target
    if arguments.target_input is not None:
        targets = list(iterate_lines(arguments.target_input, arguments.max_line_characters))
    sources, targets = read_texts(sources, targets)
    nonblank = [index for index, source in enumerate(sources) if source.strip()]
    if form == "png" and len(nonblank) != 1:
        raise MetaphraseError(f"A picture must show one sentence, got {len(nonblank)}. Word alignments show several.")
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(arguments.model, **chosen_loading_options(arguments))
    options = {"layer": arguments.layer, "head": arguments.head, **chosen_generation_options(arguments)}
    options["show_progress"] = None if len(nonblank) > 1 else False

    def compute_maps(indices: list[int]) -> list[AttentionMap]:
        chosen_targets = None if targets is None else [targets[index] for index in indices]
        with numbering([index + 1 for index in indices]):
            maps = cross_attentions(generator, [sources[index] for index in indices], chosen_targets, **options)
        for attention in maps if form == "png" or targets is None else ():
            logger.info("Target: %s", attention.target)
        return maps

    if form == "png":
        [attention] = compute_maps(nonblank)
        tokens = attention.source_tokens, attention.target_tokens
        layer = "last layer" if arguments.layer == -1 else f"layer {arguments.layer}"
        head = "mean over its heads" if arguments.head is None else f"head {arguments.head}"
        choice = "mean over all layers and heads" if arguments.layer is None else f"{layer}, {head}"
        draw_attention_map(attention.weights, *tokens, output, title=f"Cross-attention: {choice}")
    else:
        if output is not None:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
        with OutputFile(output) as file:
            for start in range(0, len(sources), SENTENCES_AT_A_TIME):
                part = range(start, min(start + SENTENCES_AT_A_TIME, len(sources)))
                indices = [index for index in part if sources[index].strip()]
                links = dict(zip(indices, map(format_pharaoh, map(word_alignment, compute_maps(indices))), strict=True))
                # A blank source has an empty line.
                file.write("".join(links.get(index, "") + "\n" for index in part))
            file.finish()
    if len(nonblank) < len(sources):
        effect = "have an empty line" if form == "pharaoh" else "are left out"
        logger.warning("Empty sources, which %s: %d of %d.", effect, len(sources) - len(nonblank), len(sources))
    generator.log_counts(len(nonblank))
    if output is not None:
        logger.info("Written to %s", output)
