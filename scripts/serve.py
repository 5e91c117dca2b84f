"""`metaphrase serve MODEL ...`: serve models by HTTP."""

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

import torch

from metaphrase.errors import MetaphraseError, naming_extra
from metaphrase.inference.batches import LONGER_SOURCES
from metaphrase.scripts.parsers import chosen_generation_options, chosen_loading_options
from metaphrase.storage.loading import check_device, default_device
from metaphrase.texts.plan import Terms, read_glossary

with naming_extra("serve", "A library of the server"):
    import python_multipart  # noqa: F401  Starlette reads forms with files by this library
    import uvicorn

    from metaphrase.serving import Limits
    from metaphrase.serving.app import make_app
    from metaphrase.serving.batcher import Batcher
    from metaphrase.serving.models import Pivot, ServedModel
    from metaphrase.serving.service import Service

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    if arguments.device is not None:
        check_device(arguments.device)
    limits = Limits(**{name: getattr(arguments, name) for name in Limits.__dataclass_fields__})
    glossaries = {name: Terms(glossary=read_glossary(path)) for name, path in map(split_name, arguments.glossaries)}
    path = arguments.api_keys
    words = os.environ.get("METAPHRASE_API_KEYS", "").split(",")
    if path is not None:
        words = Path(path).read_text("utf-8-sig").splitlines()
    keys = [word.strip() for word in words if word.strip()]
    if path is not None and not keys:
        raise MetaphraseError(f"`api_keys` must have a key on each line, got none in {path!r}.")
    batcher, models = Batcher(divide_threads(arguments.device)), []
    for word in arguments.models:
        name, path = split_name(word) if "=" in word else (None, word)
        loading = chosen_loading_options(arguments)
        models.append(ServedModel.from_pretrained(name, path, batcher, task=arguments.task, **loading))
        # The options of the command line are the defaults of the model.
        options, config = chosen_generation_options(arguments), models[-1].generator.model.generation_config
        # A length that is given holds for all sources.
        config.update(**options, **dict.fromkeys(LONGER_SOURCES if "max_length" in options else ()))
    service = Service(models, batcher, limits=limits, api_keys=keys, glossaries=glossaries)
    for model in models:
        languages = f"{','.join(model.source_languages[:5])} to {','.join(model.target_languages[:5])}"
        logger.info("Model %s: %s%s.", model.name, model.task, f", {languages}" if model.source_languages else "")
    routes = [(source, target, route) for source, row in service.routes.items() for target, route in row.items()]
    if pivots := [f"{first}-{route.language}-{last}" for first, last, route in routes if isinstance(route, Pivot)]:
        logger.info("Pairs of two models in a row: %s.", ", ".join(pivots[:9]) + ", ..." * (len(pivots) > 9))
    # The garbage collector, which stops all threads, need not search the models.
    gc.freeze()
    # Threads with long texts hand Python over to the thread that answers after this time, in seconds.
    sys.setswitchinterval(0.001)
    uvicorn.run(
        make_app(service, arguments.cors_origins),
        host=arguments.host,
        port=arguments.port,
        log_config=None,
        # The gate writes the access log, without texts.
        access_log=False,
        server_header=False,
        # Longer than a refused client waits before it comes back.
        timeout_keep_alive=75,
        # Else one client that never ends its request keeps the server alive for ever.
        timeout_graceful_shutdown=30,
    )


def divide_threads(device: str | None) -> int:
    """Divide torch's threads among batches that are decoded at once, and return their number.

    On a CPU, two batches with a thread each are decoded faster than one with two threads, whose small steps wait for each
    other. More than four batches wait for Python.
    """
    if torch.device(default_device() if device is None else device).type != "cpu":
        return 1
    num_threads = torch.get_num_threads()
    num_batches = min(4, num_threads)
    torch.set_num_threads(num_threads // num_batches)
    return num_batches


def split_name(word: str) -> tuple[str, str]:
    """Return name and path of NAME=PATH."""
    name, _, path = word.partition("=")
    if not name or not path:
        raise MetaphraseError(f"A name and a path must stand as NAME=PATH, got {word!r}.")
    return name, path
