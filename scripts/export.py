"""`metaphrase export MODEL DIR --format ctranslate2` or `onnx`: export a model."""

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
        description="Export a Metaphrase model with tokenizers and generation settings. "
        "A model that the format does not support is an error.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of a Metaphrase model")
    parser.add_argument("output", metavar="DIR", help="folder to write")
    parser.add_argument("--format", required=True, choices=FORMATS, help="format to write")
    parser.add_argument(
        "--quantization",
        metavar="TYPE",
        help="type of CTranslate2's weights: float32, float16, bfloat16, int16, int8, int8_float32, int8_float16 or "
        "int8_bfloat16 [as saved]; ONNX is always float32",
    )
    # --force is the name in CTranslate2's converters.
    parser.add_argument("--overwrite", "--force", action="store_true", help="replace an existing export")
    return parser


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    # The imports need extras, which --help must not.
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
