"""`metaphrase export MODEL DIR --format ctranslate2` or `onnx`: export a model."""

import argparse
import logging

logger = logging.getLogger(__name__)

FORMATS = ("ctranslate2", "onnx")


def main(arguments: argparse.Namespace) -> None:
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
