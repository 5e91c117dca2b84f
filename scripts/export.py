"""`metaphrase export MODEL DIR --format ctranslate2` or `onnx`: export a model."""

import logging
from collections.abc import Sequence

from metaphrase.scripts.console import verb_parser

logger = logging.getLogger(__name__)

FORMATS = ("ctranslate2", "onnx")


def main(words: Sequence[str]) -> None:
    parser = verb_parser(
        "export",
        "Export a Metaphrase model with tokenizers and generation settings. "
        "A model that the format does not support is an error.",
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
    arguments = parser.parse_args(words)
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
