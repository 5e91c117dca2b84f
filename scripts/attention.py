"""`metaphrase attention MODEL`: shows where the decoder looks in the source, as a picture, a page, or links between words."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import set_seed

from metaphrase.decoding.options import (
    add_generation_options,
    add_language_options,
    chosen_generation_options,
)
from metaphrase.hub_card import draw_attention_map, write_attention_page
from metaphrase.hub_card.attention_page import MAX_SENTENCES, MAX_WEIGHT_BYTES, check_sentences, describe_choice
from metaphrase.inference import Generator, cross_attentions, format_pharaoh, word_alignment
from metaphrase.inference.line_files import NewFile, OutputStream, check_files, read_lines, standard_output
from metaphrase.inference.source_limits import TooLongError
from metaphrase.scripts.console import run, warn_of_lengths
from metaphrase.scripts.options import add_source_length

logger = logging.getLogger(__name__)

SUFFIXES = {".png": "png", ".html": "html", ".htm": "html", ".align": "pharaoh", ".txt": "pharaoh"}
# Links go to standard output by default.
DEFAULT_OUTPUTS = {"png": "attention.png", "html": "attention.html", "pharaoh": None}
SENTENCES_AT_A_TIME = 1024


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase attention",
        description="Shows the cross-attention of sources and targets: the mean over all layers and heads, or a choice. "
        "png is a picture of one sentence, html a page of several in which words can be pointed at, pharaoh one line of "
        "links `source word-target word` for each sentence.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    parser.add_argument("--source", action="append", metavar="TEXT", help="a source; may be given several times")
    parser.add_argument("--target", action="append", metavar="TEXT", help="its target; by default the model writes it")
    parser.add_argument(
        "--input", metavar="FILE", help="sources, one a line; by default, without --source, standard input"
    )
    parser.add_argument("--target_input", metavar="FILE", help="their targets, one a line")
    parser.add_argument("--layer", type=int, help="mean over the heads of this decoder layer; -1 is the last")
    parser.add_argument("--head", type=int, help="only this head of the layer")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write: .png, .html (at most "
        f"{MAX_SENTENCES} sentences and {MAX_WEIGHT_BYTES:,} bytes of weights), .align or .txt "
        "[attention.png, attention.html, or links to standard output]",
    )
    parser.add_argument(
        "--format", choices=list(DEFAULT_OUTPUTS), help="what to write [by the output's suffix, or png]"
    )
    parser.add_argument("--source_prefix", default="", help="stands before the source, such as 'summarize: '")
    add_source_length(parser)
    add_language_options(parser)
    parser.add_argument("--device", help="where to run; an accelerator by default, if there is one")
    parser.add_argument("--dtype", default="auto", help="type of the weights [%(default)s: as saved]")
    parser.add_argument("--seed", type=int, default=42, help="of sampling [%(default)s]")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code that comes with the model or its tokenizer"
    )
    add_generation_options(parser)
    return parser


def choose_format(output: str | None, name: str | None) -> str:
    """The format that was asked for by name, or else by the suffix of the output.

    Raises:
        ValueError: If the suffix says nothing.
    """
    if name is not None or output is None:
        return name or "png"
    suffix = Path(output).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"`output` must end in one of {', '.join(SUFFIXES)} where no `format` is given, got {output!r}."
        )
    return SUFFIXES[suffix]


def read_pairs(arguments: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """Sources, and targets if there are any, from the command line, files or standard input.

    Raises:
        ValueError: If a side is given twice, or targets in another way than sources, or not as many.
    """
    for name, text, file in (
        ("source", arguments.source, arguments.input),
        ("target", arguments.target, arguments.target_input),
    ):
        if text is not None and file is not None:
            raise ValueError(f"`{name}` must be given as text or as a file, got both: {text[0]!r} and {file!r}.")
    sources = list(arguments.source or read_lines(arguments.input))
    targets = arguments.target if arguments.target_input is None else list(read_lines(arguments.target_input))
    if targets is not None and len(targets) != len(sources):
        raise ValueError(f"`source` and `target` must be equally many, got {len(sources)} and {len(targets)}.")
    return sources, targets


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    form = choose_format(arguments.output, arguments.format)
    output = arguments.output or DEFAULT_OUTPUTS[form]
    for name in ("input", "target_input"):
        check_files(getattr(arguments, name), output, name)
    sources, targets = read_pairs(arguments)
    written = [index for index, source in enumerate(sources) if source.strip()]
    if form == "png" and len(written) != 1:
        raise ValueError(f"A picture must show one sentence, got {len(written)}: for several write a page, .html.")
    if form == "html":
        check_sentences(len(written))
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        source_lang=arguments.source_lang,
        target_lang=arguments.target_lang,
        source_prefix=arguments.source_prefix,
        max_source_length=arguments.max_source_length,
    )
    options = {"layer": arguments.layer, "head": arguments.head, "show_progress": None if len(written) > 1 else False}
    options |= chosen_generation_options(arguments)
    if form == "pharaoh":
        write_links(generator, sources, targets, output, options)
    else:
        with naming_lines(written):
            maps = cross_attentions(
                generator,
                [sources[index] for index in written],
                None if targets is None else [targets[index] for index in written],
                keep_heads=form == "html",
                **options,
            )
        choice = {"layer": arguments.layer, "head": arguments.head}
        if form == "html":
            write_attention_page(maps, output, title=f"Cross-attention of {arguments.model}", **choice)
        else:
            [given] = maps
            tokens = given.source_tokens, given.target_tokens
            draw_attention_map(given.weights, *tokens, output, title=f"Cross-attention: {describe_choice(**choice)}")
            logger.info("Target: %s", given.target)
    if len(written) < len(sources):
        empty = "have an empty line" if form == "pharaoh" else "are left out"
        logger.warning("%d of %d sources are empty and %s.", len(sources) - len(written), len(sources), empty)
    warn_of_lengths(generator, len(written))
    if output is not None:
        logger.info("Written to %s", output)


@contextlib.contextmanager
def naming_lines(written: Sequence[int]) -> Iterator[None]:
    """Numbers a source or target that is too long as its line, where others were left out because they are empty."""
    try:
        yield
    except TooLongError as error:
        raise type(error)(written[error.number - 1] + 1, error.num_tokens, error.limit) from None


def write_links(
    generator: Generator, sources: list[str], targets: list[str] | None, output: str | None, options: dict
) -> None:
    """Writes one line of links for each source, an empty one for an empty source; targets that the model wrote are logged."""
    with contextlib.ExitStack() as stack:
        if output is None:
            file = OutputStream(standard_output())
        else:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(NewFile(output))
        for start in range(0, len(sources), SENTENCES_AT_A_TIME):
            part = range(start, min(start + SENTENCES_AT_A_TIME, len(sources)))
            written = [index for index in part if sources[index].strip()]
            own = None if targets is None else [targets[index] for index in written]
            with naming_lines(written):
                maps = cross_attentions(generator, [sources[index] for index in written], own, **options)
            lines = dict(zip(written, map(format_pharaoh, map(word_alignment, maps)), strict=True))
            file.write("".join(lines.get(index, "") + "\n" for index in part))
            if targets is None:
                for attention in maps:
                    logger.info("Target: %s", attention.target)
        file.finish()


if __name__ == "__main__":
    sys.exit(run(main, "attention"))
