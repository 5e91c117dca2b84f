"""The engine CTranslate2: an exported model, decoded by CTranslate2."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.inference.ctranslate2.options import Search, translate_options
from metaphrase.inference.engine import BatchSearch, Engine, Hypothesis
from metaphrase.inference.loading import find_device
from metaphrase.inference.source_limits import TooLongError

try:
    import ctranslate2
except ImportError as error:
    raise ImportError("CTranslate2 is not installed: pip install metaphrase[ctranslate2]") from error

# 4.8.0 computes a relative bias of each layer's own wrongly, without a word.
if Version(ctranslate2.__version__) < Version("4.8.5"):
    raise ImportError(
        f"CTranslate2 must be at least 4.8.5, got {ctranslate2.__version__}: pip install metaphrase[ctranslate2]"
    )

_MODEL_NAME = "model.bin"


class CTranslate2Engine(Engine):
    """A folder of CTranslate2, from ids to hypotheses.

    CTranslate2 knows tokens by name; here they have ids, as everywhere else.
    """

    def __init__(
        self, folder: str | os.PathLike, *, device: str | torch.device | None = None, compute_type: str = "default"
    ):
        """Loads the model.

        Args:
            folder: What `export` wrote, or CTranslate2's own converter.
            device: `cpu`, `cuda` or `cuda:1`; by default a GPU if CTranslate2 finds one.
            compute_type: As for CTranslate2's `Translator`; `default` is that of the folder.

        Raises:
            ValueError: If it is no such folder, or the device cannot compute so.
        """
        self.folder = Path(folder)
        if not (self.folder / _MODEL_NAME).is_file():
            raise ValueError(f"A folder of CTranslate2 must hold {_MODEL_NAME}, got none in {self.folder}.")
        place = _find_place(device)
        self._settings = {
            "device": place.type,
            "device_index": place.index or 0,
            "compute_type": compute_type,
            "intra_threads": torch.get_num_threads(),
        }
        self.translator = self._load()
        self.sources, self.targets = (self._vocabulary(side) for side in ("source", "target"))
        self._target_ids = {token: index for index, token in enumerate(self.targets)}
        config = json.loads((self.folder / CONFIG_NAME).read_text(encoding="utf-8"))
        self._start = config["decoder_start_token"]
        self.generation_config = self._read_generation_config(config)
        self._copy: tempfile.TemporaryDirectory | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
    ) -> "CTranslate2Engine":
        """Loads an exported folder, or a copy of a Metaphrase model, converted for as long as the engine lives.

        Args:
            name_or_path: Such a folder; of a Metaphrase model the name on the Hub will do.
            device: See the constructor.
            dtype: `auto` is the type of the weights as they are; else a type of torch or a compute type of CTranslate2.

        Raises:
            ValueError: If CTranslate2 cannot express the model, or cannot compute so.
        """
        device = _find_place(device)
        compute_type = str(dtype).removeprefix("torch.")
        compute_type = "default" if compute_type == "auto" else compute_type
        if is_exported(name_or_path):
            return cls(name_or_path, device=device, compute_type=compute_type)
        folder, copy = converted_copy(name_or_path)
        engine = cls(folder, device=device, compute_type=compute_type)
        engine._copy = copy
        return engine

    def _load(self) -> "ctranslate2.Translator":
        return ctranslate2.Translator(os.fspath(self.folder), **self._settings)

    def _vocabulary(self, side: str) -> list[str]:
        path = self.folder / f"{side}_vocabulary.json"
        path = path if path.is_file() else self.folder / "shared_vocabulary.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def _read_generation_config(self, config: Mapping[str, Any]) -> GenerationConfig:
        """The settings beside the model; where it does not name the special ids, CTranslate2's own."""
        if (self.folder / GENERATION_CONFIG_NAME).is_file():
            settings = GenerationConfig.from_pretrained(self.folder)
        else:
            settings = GenerationConfig()
        for name, token in (("eos_token_id", config["eos_token"]), ("decoder_start_token_id", self._start)):
            if getattr(settings, name) is None and token is not None:
                setattr(settings, name, self._target_ids.get(token))
        return settings

    @contextlib.contextmanager
    def searching(self, generation_kwargs: Mapping[str, Any], return_scores: bool) -> Iterator[BatchSearch]:
        """See `Engine`, and for what differs `translate_options`."""
        asked = translate_options(
            self.generation_config, generation_kwargs, vocab_size=len(self.targets), return_scores=return_scores
        )
        prefix = self._prefix(asked)
        translator = self.translator
        if asked.is_sampling:
            # Its random numbers are those of a thread, seeded once and for all: only new threads follow the seed of torch.
            ctranslate2.set_random_seed(int(torch.randint(2**31 - 1, ())))
            translator = self._load()
        suppressed = [[self.targets[index] for index in word] for word in asked.suppressed]
        options = asked.options | ({"suppress_sequences": suppressed} if suppressed else {})
        yield lambda sources: self._search(translator, sources, asked, options, prefix, return_scores)

    def _prefix(self, asked: Search) -> list[str] | None:
        """What the targets begin with, as far as the folder does not say it itself.

        Raises:
            ValueError: If the folder says something else.
        """
        for name, index in (
            ("decoder_start_token_id", asked.start),
            *(("forced_bos_token_id", i) for i in asked.forced),
        ):
            if index is None or not 0 <= index < len(self.targets):
                raise ValueError(f"`{name}` must be an id from 0 to {len(self.targets) - 1}, got {index}.")
        start = self.targets[asked.start]
        if self._start is not None and start != self._start:
            raise ValueError(
                f"`decoder_start_token_id` must be {self._target_ids[self._start]} ({self._start}), with which the model was "
                f"exported, got {asked.start} ({start})."
            )
        prefix = ([start] if self._start is None else []) + [self.targets[index] for index in asked.forced]
        return prefix or None

    def _search(
        self,
        translator: "ctranslate2.Translator",
        sources: list[Sequence[int]],
        asked: Search,
        options: dict[str, Any],
        prefix: list[str] | None,
        return_scores: bool,
    ) -> list[list[Hypothesis]]:
        for source in sources:
            if source and not 0 <= min(source) <= max(source) < len(self.sources):
                raise ValueError(
                    f"`sources` must consist of ids from 0 to {len(self.sources) - 1}, got {min(source)} to {max(source)}."
                )
        try:
            results = translator.translate_batch(
                [[self.sources[index] for index in source] for source in sources],
                target_prefix=None if prefix is None else [prefix] * len(sources),
                end_token=[self.targets[index] for index in asked.ends],
                # It counts in the length by which a score is divided only where it is returned.
                return_end_token=True,
                return_scores=return_scores,
                # Nothing is cut off.
                max_input_length=0,
                **options,
            )
        except RuntimeError as error:
            if "position encodings" not in str(error):
                raise
            # The table is inside the model: its length is told here alone.
            limit = re.search(r">= (\d+)", str(error))
            for number, source in enumerate(sources if limit else [], start=1):
                if len(source) > int(limit[1]):
                    raise TooLongError(number, len(source), int(limit[1])) from error
            raise ValueError(f"Texts must not be longer than the exported table of positions: {error}.") from error
        return [self._hypotheses(result, asked, return_scores) for result in results]

    def _hypotheses(
        self, result: "ctranslate2.TranslationResult", asked: Search, return_scores: bool
    ) -> list[Hypothesis]:
        ends = set(asked.ends)
        rows = [[self._target_ids[token] for token in tokens] for tokens in result.hypotheses]
        are_finished = [bool(ids) and ids[-1] in ends for ids in rows]
        if asked.forced_end is not None:
            rows = [ids if not ids or ids[-1] in ends else [*ids[:-1], asked.forced_end] for ids in rows]
        scores = result.scores if return_scores else [None] * len(rows)
        return [Hypothesis(*parts) for parts in zip(rows, scores, are_finished, strict=True)]


def is_exported(name_or_path: str | os.PathLike) -> bool:
    """Whether it is a folder of CTranslate2."""
    return (Path(name_or_path) / _MODEL_NAME).is_file()


def converted_copy(name_or_path: str | os.PathLike) -> tuple[Path, tempfile.TemporaryDirectory]:
    """The folder of CTranslate2 that is made of a Metaphrase model, and what it lasts as long as.

    Raises:
        ValueError: If CTranslate2 cannot express the model.
        OSError: If there is no such model.
    """
    # Here alone what decodes needs what converts.
    from metaphrase.conversion.ctranslate2.export import export_ctranslate2

    copy = tempfile.TemporaryDirectory(prefix="metaphrase_ctranslate2_")
    try:
        return export_ctranslate2(name_or_path, Path(copy.name) / "model"), copy
    except BaseException:
        copy.cleanup()
        raise


def _find_place(device: str | torch.device | None) -> torch.device:
    """The device of a name, by default a GPU if there is one.

    Raises:
        ValueError: If CTranslate2 has no such device here.
    """
    count = ctranslate2.get_cuda_device_count()
    if device is None:
        device = "cuda" if count else "cpu"
    place = find_device(device)
    if place.type != "cpu" and not (place.type == "cuda" and (place.index or 0) < count):
        raise ValueError(
            f"`device` must be cpu or, of {count} GPUs that CTranslate2 finds, cuda or its number, got {str(device)!r}."
        )
    return place
