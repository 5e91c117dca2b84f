"""`metaphrase attention MODEL --source TEXT`: draws where the decoder looks in the source for each token of the target."""

import sys

if not __package__:  # Run as a file: this folder must not hide the library `evaluate` or the standard `tokenize`.
    sys.path.pop(0)

import argparse
import logging
from collections.abc import Sequence

from transformers import set_seed

from metaphrase.hub_card import draw_attention_map
from metaphrase.inference import Generator
from metaphrase.inference.alignment import cross_attention
from metaphrase.inference.generation_options import add_generation_options, chosen_generation_options
from metaphrase.scripts.console import run

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase attention",
        description="Draws the cross-attention of a source and a target: the mean over all layers and heads, or a choice.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    parser.add_argument("--source", required=True, metavar="TEXT", help="the source")
    parser.add_argument("--target", metavar="TEXT", help="the target; by default the model generates it")
    parser.add_argument("--layer", type=int, help="mean over the heads of this decoder layer; -1 is the last")
    parser.add_argument("--head", type=int, help="only this head of the layer")
    parser.add_argument("--output", default="attention.png", metavar="FILE", help="picture to write [%(default)s]")
    parser.add_argument("--source_prefix", default="", help="stands before the source, such as 'summarize: '")
    parser.add_argument("--device", help="where to run; an accelerator by default, if there is one")
    parser.add_argument("--dtype", default="auto", help="type of the weights [%(default)s: as saved]")
    parser.add_argument("--seed", type=int, default=42, help="of sampling [%(default)s]")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    add_generation_options(parser)
    return parser


def describe_choice(layer: int | None, head: int | None) -> str:
    if layer is None:
        return "Cross-attention, mean over all layers and heads"
    return f"Cross-attention of layer {layer}, " + ("mean over its heads" if head is None else f"head {head}")


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    set_seed(arguments.seed)
    generator = Generator.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        source_prefix=arguments.source_prefix,
    )
    attention = cross_attention(
        generator,
        arguments.source,
        arguments.target,
        layer=arguments.layer,
        head=arguments.head,
        **chosen_generation_options(arguments),
    )
    path = draw_attention_map(
        attention.weights,
        attention.source_tokens,
        attention.target_tokens,
        arguments.output,
        title=describe_choice(arguments.layer, arguments.head),
    )
    if generator.num_unfinished:
        logger.warning("The target met the length limit before its end: raise max_length or max_new_tokens.")
    logger.info("Target: %s", attention.target)
    logger.info("Written to %s", path)


if __name__ == "__main__":
    sys.exit(run(main, "attention"))
