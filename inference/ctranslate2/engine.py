"""Decode an exported model with CTranslate2."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.conversion.ctranslate2 import ctranslate2, export
from metaphrase.inference.ctranslate2.options import Search, translate_options
from metaphrase.inference.engine import BatchSearch, Hypothesis, find_device, is_exported
from metaphrase.inference.sources import TooLongError
from metaphrase.storage.folders import WriteLock, folder_in_one_step, read_json
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME, VocabularyMap


class CTranslate2Engine:
    """Engine over a CTranslate2 folder. Takes and returns ids, which CTranslate2 sees as token strings."""

    def __init__(
        self, folder: str | os.PathLike, *, device: str | torch.device | None = None, compute_type: str = "default"
    ):
        """Load the model.

        Args:
            folder: Written by `metaphrase export` or by CTranslate2's own converters.
            device: `cpu`, `cuda` or `cuda:1`. The default is a GPU if CTranslate2 finds one.
            compute_type: As for CTranslate2's `Translator`; `default` is that of the folder.

        Raises:
            ValueError: If the folder holds no model, or the device does not support the compute type.
        """
        self.folder = Path(folder)
        if not is_exported(folder):
            raise ValueError(f"A folder of CTranslate2 must hold model.bin, got none in {self.folder}.")
        torch_device = _find_cuda_or_cpu(device)
        self._load = functools.partial(
            ctranslate2.Translator,
            os.fspath(folder),
            device=torch_device.type,
            device_index=torch_device.index or 0,
            compute_type=compute_type,
            # Calls of several threads run at once, on all processors together. A GPU has one model.
            inter_threads=max(1, (os.cpu_count() or 1) // torch.get_num_threads()) if torch_device.type == "cpu" else 1,
            intra_threads=torch.get_num_threads(),
        )
        config = read_json(self.folder / CONFIG_NAME)
        for name in ("add_source_bos", "add_source_eos"):
            # CTranslate2 reads them only when it decodes.
            if not isinstance(config.get(name), bool):
                path = str(self.folder / CONFIG_NAME)
                raise ValueError(f"`{name}` in {path!r} must be true or false, got {config.get(name)!r}.")
        try:
            self.translator = self._load()
        except (RuntimeError, UnicodeDecodeError) as error:
            # Device and compute type are checked, so that the files are at fault.
            raise ValueError(f"A folder of CTranslate2 must hold a whole model, got {self.folder}: {error}.") from error
        self.sources, self.targets = (self._vocabulary(side) for side in ("source", "target"))
        self._target_ids = {token: index for index, token in enumerate(self.targets)}
        self._start = config.get("decoder_start_token")
        self.generation_config = self._read_generation_config(config)
        self._copy: tempfile.TemporaryDirectory | None = None
        # True to use the vocabulary map of the folder.
        self.use_vmap = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
    ) -> "CTranslate2Engine":
        """Load an exported folder, or convert a Metaphrase model into a temporary copy that lives as long as the engine.

        Args:
            name_or_path: Exported folder, or folder or Hub id of a Metaphrase model.
            device: As for the constructor.
            dtype: `auto` keeps the type of the weights. Else a torch type or a compute type of CTranslate2.

        Raises:
            ValueError: If CTranslate2 does not support the model or the compute type.
        """
        device = _find_cuda_or_cpu(device)
        compute_type = str(dtype).removeprefix("torch.")
        compute_type = "default" if compute_type == "auto" else compute_type
        if is_exported(name_or_path):
            return cls(name_or_path, device=device, compute_type=compute_type)
        folder, copy = converted_copy(name_or_path)
        engine = cls(folder, device=device, compute_type=compute_type)
        engine._copy = copy
        return engine

    def _vocabulary(self, side: str) -> list[str]:
        path = self.folder / f"{side}_vocabulary.json"
        path = path if path.is_file() else self.folder / "shared_vocabulary.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def _read_generation_config(self, config: Mapping[str, Any]) -> GenerationConfig:
        """Read the generation config of the folder. Special ids that it lacks come from CTranslate2's config."""
        if (self.folder / GENERATION_CONFIG_NAME).is_file():
            generation_config = GenerationConfig.from_pretrained(self.folder)
        else:
            generation_config = GenerationConfig()
        for name, token in (("eos_token_id", config.get("eos_token")), ("decoder_start_token_id", self._start)):
            if getattr(generation_config, name) is None and token is not None:
                setattr(generation_config, name, self._target_ids.get(token))
        return generation_config

    @contextlib.contextmanager
    def searching(self, generation_kwargs: Mapping[str, Any], return_scores: bool) -> Iterator[BatchSearch]:
        """See `Engine`. `translate_options` lists the options that mean something else in CTranslate2."""
        search = translate_options(self.generation_config, generation_kwargs, vocab_size=len(self.targets))
        prefix = self._prefix(search)
        translator = self.translator
        if search.is_sampling:
            # CTranslate2 seeds its random numbers when a thread starts. A new translator has new threads.
            ctranslate2.set_random_seed(int(torch.randint(2**31 - 1, ())))
            translator = self._load()
        suppressed = [[self.targets[index] for index in word] for word in search.suppressed]
        options = search.options | ({"suppress_sequences": suppressed} if suppressed else {})

        def search_batch(sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
            for source in sources:
                if source and not 0 <= min(source) <= max(source) < len(self.sources):
                    raise ValueError(
                        f"`sources` must consist of ids from 0 to {len(self.sources) - 1}, got {min(source)} to {max(source)}."
                    )
            try:
                results = translator.translate_batch(
                    [[self.sources[index] for index in source] for source in sources],
                    target_prefix=None if prefix is None else [prefix] * len(sources),
                    end_token=[self.targets[index] for index in search.ends],
                    # The length penalty counts the end token only if it is returned.
                    return_end_token=True,
                    return_scores=return_scores,
                    # Turns off CTranslate2's silent truncation.
                    max_input_length=0,
                    use_vmap=self.use_vmap,
                    **options,
                )
            except RuntimeError as error:
                if "position encodings" not in str(error):
                    raise
                # Only the error tells the length of the position table, which is inside the model.
                limit = re.search(r">= (\d+)", str(error))
                for number, source in enumerate(sources if limit else [], start=1):
                    if len(source) > int(limit[1]):
                        raise TooLongError(number, len(source), int(limit[1])) from error
                raise ValueError(f"Texts must not be longer than the exported table of positions: {error}.") from error
            return [self._hypotheses(result, search, return_scores) for result in results]

        yield search_batch

    def _prefix(self, search: Search) -> list[str] | None:
        """Return the tokens that targets begin with, without the start token that the folder's config states.

        Raises:
            ValueError: If an id is unknown, or the folder has another start token.
        """
        for name, index in (
            ("decoder_start_token_id", search.start),
            *(("forced_bos_token_id", i) for i in search.forced),
        ):
            if index is None or not 0 <= index < len(self.targets):
                raise ValueError(f"`{name}` must be an id from 0 to {len(self.targets) - 1}, got {index}.")
        start = self.targets[search.start]
        if self._start is not None and start != self._start:
            raise ValueError(
                f"`decoder_start_token_id` must be {self._target_ids[self._start]} ({self._start}), as exported, "
                f"got {search.start} ({start})."
            )
        prefix = ([start] if self._start is None else []) + [self.targets[index] for index in search.forced]
        return prefix or None

    def _hypotheses(
        self, result: "ctranslate2.TranslationResult", search: Search, return_scores: bool
    ) -> list[Hypothesis]:
        ends = set(search.ends)
        rows = [[self._target_ids[token] for token in tokens] for tokens in result.hypotheses]
        are_finished = [bool(ids) and ids[-1] in ends for ids in rows]
        if search.forced_end is not None:
            rows = [ids if not ids or ids[-1] in ends else [*ids[:-1], search.forced_end] for ids in rows]
        scores = result.scores if return_scores else [None] * len(rows)
        return [Hypothesis(*parts) for parts in zip(rows, scores, are_finished, strict=True)]


def converted_copy(name_or_path: str | os.PathLike) -> tuple[Path, tempfile.TemporaryDirectory]:
    """Convert a Metaphrase model. Returns the CTranslate2 folder, and the temporary folder that holds it.

    Raises:
        ValueError: If CTranslate2 does not support the model.
        OSError: If the model does not exist.
    """
    from metaphrase.conversion.ctranslate2.export import export_ctranslate2

    copy = tempfile.TemporaryDirectory(prefix="metaphrase_ctranslate2_")
    try:
        return export_ctranslate2(name_or_path, Path(copy.name) / "model"), copy
    except BaseException:
        copy.cleanup()
        raise


def _find_cuda_or_cpu(name: str | torch.device | None) -> torch.device:
    """Return the device of a name, by default a GPU if CTranslate2 finds one.

    Raises:
        ValueError: If CTranslate2 has no such device here.
    """
    count = ctranslate2.get_cuda_device_count()
    if name is None:
        name = "cuda" if count else "cpu"
    device = find_device(name)
    if device.type != "cpu" and not (device.type == "cuda" and (device.index or 0) < count):
        raise ValueError(f"`device` must be cpu or one of the {count} GPUs that CTranslate2 finds, got {str(name)!r}.")
    return device


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
