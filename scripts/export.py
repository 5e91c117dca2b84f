"""`metaphrase export MODEL DIR --format ctranslate2`, `onnx`, `web` or `argos`: export a model."""

import argparse
import logging

logger = logging.getLogger(__name__)

FORMATS = ("ctranslate2", "onnx", "web", "argos")
# The formats of each option that not all formats have.
_FORMATS_OF_OPTION = {
    "quantization": ("ctranslate2", "argos"),
    "library": ("web",),
    "source_lang": ("argos",),
    "target_lang": ("argos",),
}


def main(arguments: argparse.Namespace) -> None:
    options = {"overwrite": arguments.overwrite}
    for name, owners in _FORMATS_OF_OPTION.items():
        value = getattr(arguments, name)
        if arguments.format in owners:
            options[name] = value
        elif value is not None:
            raise ValueError(f"`--{name}` must be left out with --format {arguments.format}, got {value!r}.")
    # The imports need extras, which --help must not.
    if arguments.format == "onnx":
        from metaphrase.conversion.onnx.export import export_onnx as export
    elif arguments.format == "web":
        from metaphrase.conversion.onnx.web import export_web as export
    elif arguments.format == "argos":
        from metaphrase.conversion.ctranslate2.argos import export_argos as export
        from metaphrase.serving.models import base_code, name_of

        for name in ("source", "target"):
            code = options.pop(f"{name}_lang")
            if code is None:
                raise ValueError(f"`--{name}_lang` must be given with --format argos, such as en.")
            options[f"{name}_language"] = base_code(code), name_of(code)
    else:
        from metaphrase.conversion.ctranslate2.export import export_ctranslate2 as export
    logger.info("Written to %s", export(arguments.model, arguments.output, **options))
