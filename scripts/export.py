"""`metaphrase export MODEL DIR --format ctranslate2` or `onnx`: a model for an engine of another kind."""

import sys

if __name__ == "__main__" and not __package__:  # Run as a file: its folder must not hide `evaluate` or `tokenize`.
    sys.path.pop(0)

import argparse
import logging
from collections.abc import Sequence

from metaphrase.scripts.console import run

logger = logging.getLogger(__name__)

FORMATS = ("ctranslate2", "onnx")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metaphrase export",
        description="Writes a Metaphrase model for an engine of another kind, with tokenizers and generation settings. "
        "What the engine cannot express is refused, option by option.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, or name on the Hub, of a Metaphrase model")
    parser.add_argument("output", metavar="DIR", help="folder to write")
    parser.add_argument("--format", required=True, choices=FORMATS, help="the engine")
    parser.add_argument(
        "--quantization",
        metavar="TYPE",
        help="type of CTranslate2's weights: float32, float16, bfloat16, int16, int8, int8_float32, int8_float16 or "
        "int8_bfloat16 [that of the checkpoint]; ONNX has float32",
    )
    # The converters of CTranslate2 say --force.
    parser.add_argument("--overwrite", "--force", action="store_true", help="replace an export that is there already")
    return parser


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    # What writes a format is an extra, not needed for --help.
    if arguments.format == "onnx":
        if arguments.quantization is not None:
            raise ValueError(f"`--quantization` must be left out with --format onnx, got {arguments.quantization!r}.")
        from metaphrase.conversion.onnx.export import export_onnx

        written = export_onnx(arguments.model, arguments.output, overwrite=arguments.overwrite)
    else:
        from metaphrase.conversion.ctranslate2.export import export_ctranslate2

        written = export_ctranslate2(
            arguments.model, arguments.output, quantization=arguments.quantization, overwrite=arguments.overwrite
        )
    logger.info("Written to %s", written)


if __name__ == "__main__":
    sys.exit(run(main, "export"))
