"""`metaphrase export MODEL DIR --format ctranslate2`, `onnx` or `web`: export a model."""

import argparse
import logging

logger = logging.getLogger(__name__)

FORMATS = ("ctranslate2", "onnx", "web")
# The format of each option that not all formats have.
_FORMAT_OF_OPTION = {"quantization": "ctranslate2", "library": "web"}


def main(arguments: argparse.Namespace) -> None:
    options = {"overwrite": arguments.overwrite}
    for name, owner in _FORMAT_OF_OPTION.items():
        value = getattr(arguments, name)
        if arguments.format == owner:
            options[name] = value
        elif value is not None:
            raise ValueError(f"`--{name}` must be left out with --format {arguments.format}, got {value!r}.")
    # The imports need extras, which --help must not.
    if arguments.format == "onnx":
        from metaphrase.conversion.onnx.export import export_onnx as export
    elif arguments.format == "web":
        from metaphrase.conversion.onnx.web import export_web as export
    else:
        from metaphrase.conversion.ctranslate2.export import export_ctranslate2 as export
    logger.info("Written to %s", export(arguments.model, arguments.output, **options))
