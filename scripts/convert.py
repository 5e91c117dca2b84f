"""`metaphrase convert`, `adapt`, `average` and `export`: make a model of other models."""

import argparse
import logging

from metaphrase import conversion
from metaphrase.errors import MetaphraseError
from metaphrase.plugins import import_name
from metaphrase.techniques.averaging import average_checkpoints, select_checkpoints

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    options = {name: getattr(arguments, name) for name in ("revision", "overwrite", "max_shard_size")}
    if (files := arguments.trim_vocabulary) is None:
        written = conversion.convert(arguments.source, arguments.output, to=arguments.to, **options)
    elif arguments.to in (None, "metaphrase"):
        written = conversion.trim_vocabulary(arguments.source, arguments.output, files, **options)
    else:
        raise MetaphraseError(
            f"`to` must be left out with `trim_vocabulary`, got {arguments.to!r}: trim the model first, then convert it."
        )
    logger.info("Written to %s", written)


def adapt(arguments: argparse.Namespace) -> None:
    """Run `metaphrase adapt BASE OUTPUT`."""
    names = ("encoder", "encoder_layers", "decoder_layers", "cross_attention", "dropout", "overwrite", "max_shard_size")
    options = {name: getattr(arguments, name) for name in names}
    written = conversion.adapt(arguments.base, arguments.output, **options)
    logger.info("Written to %s. Train it: `metaphrase train ... --model_name_or_path %s`", written, written)


def average(arguments: argparse.Namespace) -> None:
    """Run `metaphrase average RUN_OR_CHECKPOINTS --output DIR`."""
    folders = arguments.folders
    if len(folders) == 1:
        folders = select_checkpoints(folders[0], last=arguments.last, best=arguments.best, metric=arguments.metric)
    elif any(option is not None for option in (arguments.last, arguments.best, arguments.metric)):
        raise MetaphraseError(f"`--last`, `--best` and `--metric` need one run, got {len(folders)} folders.")
    logger.info("Written to %s", average_checkpoints(folders, arguments.output, overwrite=arguments.overwrite))


# Some of these functions need extras, which others must not.
EXPORTS = {
    "ctranslate2": "metaphrase.conversion.ctranslate2:export_ctranslate2",
    "onnx": "metaphrase.conversion.onnx.export:export_onnx",
    "web": "metaphrase.conversion.onnx.export:export_web",
    "argos": "metaphrase.conversion.ctranslate2:export_argos",
}
# The formats of each option that not all formats have.
_FORMATS_OF_OPTION = {
    "quantization": ("ctranslate2", "argos"),
    "library": ("web",),
    "source_lang": ("argos",),
    "target_lang": ("argos",),
}


def export(arguments: argparse.Namespace) -> None:
    """Run `metaphrase export MODEL DIR --format ctranslate2`, `onnx`, `web` or `argos`."""
    options = {"overwrite": arguments.overwrite}
    for name, formats in _FORMATS_OF_OPTION.items():
        value = getattr(arguments, name)
        if arguments.format in formats:
            options[name] = value
        elif value is not None:
            raise MetaphraseError(f"`--{name}` must be left out with --format {arguments.format}, got {value!r}.")
    if arguments.format == "argos":
        from metaphrase.serving.models import base_code, name_of

        for name in ("source", "target"):
            code = options.pop(f"{name}_lang")
            if code is None:
                raise MetaphraseError(f"`--{name}_lang` must be given with --format argos, such as en.")
            options[f"{name}_language"] = base_code(code), name_of(code)
    export = import_name(EXPORTS[arguments.format])
    logger.info("Written to %s", export(arguments.model, arguments.output, **options))
