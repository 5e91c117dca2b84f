"""Copies of models for CTranslate2 in a cache folder, which processes share."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from metaphrase.conversion.ctranslate2 import ctranslate2, export
from metaphrase.inference.engine import is_exported
from metaphrase.storage.folders import WriteLock, folder_in_one_step
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME, VocabularyMap

# A copy that no process has used for this long goes when another one is made.
UNUSED_DAYS = 30


def cached_copy(model: PreTrainedModel, tokenizers: TokenizerPair, vocabulary_map: VocabularyMap | None = None) -> Path:
    """Return the folder of a model's copy, made if the cache has none. It holds weights and vocabularies in float32.

    A vocabulary map is in the copy, too.

    Of several processes one makes the copy, and the others wait.

    Raises:
        ValueError: If CTranslate2 cannot express the model.
        OSError: If the cache cannot be written.
    """
    cache = cache_folder()
    map_path = None if vocabulary_map is None else vocabulary_map.path
    copy = cache / _fingerprint(model, map_path)
    if not is_exported(copy):
        cache.mkdir(parents=True, exist_ok=True)
        with _wait_for_lock(cache):
            _remove_unused(cache)
            # Another process may have made the copy meanwhile.
            if not is_exported(copy):
                with folder_in_one_step(copy) as partial:
                    export.save_weights(model, tokenizers, partial)
                    if map_path is not None:
                        shutil.copyfile(map_path, partial / VOCABULARY_MAP_NAME)
    with contextlib.suppress(OSError):
        os.utime(copy)
    return copy


def cache_folder() -> Path:
    """Return the folder of all copies: in `$METAPHRASE_CACHE`, or else in the user's cache."""
    cache = os.environ.get("METAPHRASE_CACHE")
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "metaphrase")
    return Path(cache, "ctranslate2").expanduser()


def _fingerprint(model: PreTrainedModel, map_path: Path | None) -> str:
    """Return a hash of all that a copy depends on. Names of tokens are not: a copy has its own vocabularies."""
    fields = {name: value for name, value in model.config.to_dict().items() if name[0] != "_"}
    del fields["transformers_version"]
    settings = model.generation_config
    # A start that varies is not in the copy.
    start = None if model.config.decoder_start_from_labels else settings.decoder_start_token_id
    digest = hashlib.sha256(Path(export.__file__).read_bytes())
    digest.update(b"" if map_path is None else map_path.read_bytes())
    described = [ctranslate2.__version__, fields, start, settings.eos_token_id]
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _wait_for_lock(folder: Path) -> WriteLock:
    while True:
        with contextlib.suppress(ValueError):
            return WriteLock(folder, "METAPHRASE_CACHE")
        time.sleep(0.05)


def _remove_unused(cache: Path) -> None:
    for folder in cache.iterdir():
        if time.time() - folder.stat().st_mtime > UNUSED_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)
