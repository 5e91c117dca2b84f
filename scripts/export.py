"""`metaphrase export MODEL DIR --format ctranslate2`, `onnx`, `web` or `argos`: export a model."""

import argparse
import logging

from metaphrase.plugins import import_name

logger = logging.getLogger(__name__)

# Some of these functions need extras, which others must not.
EXPORTS = {
    "ctranslate2": "metaphrase.conversion.ctranslate2:export_ctranslate2",
    "onnx": "metaphrase.conversion.onnx.export:export_onnx",
    "web": "metaphrase.conversion.onnx.web:export_web",
    "argos": "metaphrase.conversion.argos:export_argos",
}
# The formats of each option that not all formats have.
_FORMATS_OF_OPTION = {
    "quantization": ("ctranslate2", "argos"),
    "library": ("web",),
    "source_lang": ("argos",),
    "target_lang": ("argos",),
}


def main(arguments: argparse.Namespace) -> None:
    options = {"overwrite": arguments.overwrite}
    for name, formats in _FORMATS_OF_OPTION.items():
        value = getattr(arguments, name)
        if arguments.format in formats:
            options[name] = value
        elif value is not None:
            raise ValueError(f"`--{name}` must be left out with --format {arguments.format}, got {value!r}.")
    if arguments.format == "argos":
        from metaphrase.serving.models import base_code, name_of

        for name in ("source", "target"):
            code = options.pop(f"{name}_lang")
            if code is None:
                raise ValueError(f"`--{name}_lang` must be given with --format argos, such as en.")
            options[f"{name}_language"] = base_code(code), name_of(code)
    export = import_name(EXPORTS[arguments.format])
    logger.info("Written to %s", export(arguments.model, arguments.output, **options))
