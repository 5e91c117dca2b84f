"""Choice between torch and CTranslate2 for each call of a generator, by measured speed."""

import contextlib
import logging
import math
import os
import tempfile
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from metaphrase.conversion.vocabulary_map import VocabularyMap
from metaphrase.decoding.prepacked_weights import WeightRecord
from metaphrase.decoding.quantization import quantize
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import Engine, longest_target, target_limits
from metaphrase.inference.generator import torch_dtype
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.storage.loading import load_pretrained
from metaphrase.tokenization import TokenizerPair

logger = logging.getLogger(__name__)

# Most weights of a model that CTranslate2 decodes faster than torch, by type, search and batch: `benchmarks/engines.py` on one
# core of Zen 4.
_MAX_WEIGHTS = {
    ("float32", "greedy"): {"alone": 10e6, "batch": 15e6},
    ("float32", "beam"): {"alone": 15e6, "batch": 20e6},
    ("int8", "greedy"): {"alone": 40e6, "batch": math.inf},
    ("int8", "beam"): {"alone": math.inf, "batch": math.inf},
}
# Loading the copy takes longer than it saves with fewer sentences.
MIN_SENTENCES = 64
# Part of the free memory that a copy may take.
_MEMORY_SHARE = 0.5


def free_main_memory() -> int:
    """Return the free bytes of main memory. A container may have less than the machine."""
    free = psutil.virtual_memory().available
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()))
    return free


def is_faster(num_weights: int, dtype: str, num_beams: int, batch_size: int) -> bool:
    """Return True if CTranslate2 decodes faster than torch by the table of measured speeds."""
    limits = _MAX_WEIGHTS[dtype, "beam" if num_beams > 1 else "greedy"]
    return num_weights <= limits["batch" if batch_size > 1 else "alone"]


def load_engine(
    name_or_path: str | os.PathLike,
    tokenizers: TokenizerPair,
    vocabulary_map: VocabularyMap | None,
    *,
    engine: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    **loading,
) -> tuple[PreTrainedModel | Engine, "EngineChoice | None"]:
    """Load a model in CTranslate2, in int8, or for the engine `auto` with the choice of each call, which is returned, too."""
    if engine == "ctranslate2":
        from metaphrase.engines.ctranslate2_engine import CTranslate2Engine  # Needs an extra.

        model = CTranslate2Engine.from_pretrained(name_or_path, device=device, dtype=dtype)
        model.use_vmap = vocabulary_map is not None
        return model, None
    quantization = "int8" if str(dtype).removeprefix("torch.") == "int8" else None
    if quantization and torch.device(device).type != "cpu":
        raise MetaphraseError(f"`dtype` int8 needs the device cpu, got {device}.")
    model = load_pretrained(name_or_path, dtype=torch_dtype("float32" if quantization else dtype), **loading)
    model = model.to(device).eval()
    # An encoder alone writes no texts.
    is_open = engine == "auto" and hasattr(model, "generation_config")
    choice = EngineChoice(model, tokenizers, quantization, vocabulary_map) if is_open else None
    if quantization is not None:
        quantize(model)
    return model, choice


class EngineChoice:
    """A torch model, its copy in CTranslate2, and the choice between the two for each call.

    In float32 both write the same tokens. The first call that the copy makes faster makes and loads it, and takes as much memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizers: TokenizerPair,
        quantization: str | None = None,
        vocabulary_map: VocabularyMap | None = None,
    ):
        """Find out if the model can have a copy. If it is going to be quantized, write the copy's files."""
        self._tokenizers, self._map = tokenizers, vocabulary_map
        self._dtype = quantization or str(model.dtype).removeprefix("torch.")
        self._num_weights = sum(weight.numel() for weight in model.parameters())
        self._num_sentences = 0
        # A start that varies is not in the copy.
        is_fixed = not getattr(model.config, "decoder_start_from_labels", False)
        self._start = model.generation_config.decoder_start_token_id if is_fixed else None
        self._files: tempfile.TemporaryDirectory | None = None
        self._engine: Engine | None = None
        self._record: WeightRecord | None = None
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._obstacle: str | None = None
        if type(model) is not MetaphraseForConditionalGeneration:
            self._obstacle = "CTranslate2 takes Metaphrase models only"
        elif model.device.type != "cpu" or self._dtype not in ("float32", "int8"):
            self._obstacle = f"CTranslate2 is not used in {self._dtype} on {model.device.type}"
        elif not any(is_faster(self._num_weights, self._dtype, *case) for case in ((1, 1), (1, 2), (4, 1), (4, 2))):
            self._obstacle = f"faster for {self._num_weights:,} weights in {self._dtype}"
        elif quantization:
            # The weights in float32 are gone afterwards.
            self._obstacle = self._write_files(model)

    def expect_many(self) -> None:
        """Load the copy for the next call that it makes faster, even for few sentences."""
        self._num_sentences = MIN_SENTENCES

    def choose(
        self,
        model: PreTrainedModel,
        options: Mapping[str, Any],
        sources: Sequence[Sequence[int]],
        batch_size: int,
        return_scores: bool,
        has_partners: bool = False,
    ) -> PreTrainedModel | Engine:
        """Return the copy if it decodes these sources faster and writes the same tokens, else the model. Log the reason once.

        Partners, of an ensemble or for drafts, decode with the model.
        """
        self._num_sentences += len(sources)
        is_exact = self._dtype == "float32"
        if is_exact:
            # In int8 the engines round differently, so that the choice must not depend on the other texts of a call.
            batch_size = min(batch_size, len(sources))

        def find_obstacle() -> str | None:
            if has_partners:
                return "CTranslate2 takes one model at a time"
            if self._obstacle is not None:
                return self._obstacle
            if is_exact and self._num_sentences < MIN_SENTENCES:
                return f"fewer than {MIN_SENTENCES} sentences do not pay for loading CTranslate2"
            # Needs an extra.
            from metaphrase.conversion.checkpoints import SINUSOIDAL_POSITIONS
            from metaphrase.engines.ctranslate2_engine import translate_exactly

            search = translate_exactly(model.generation_config, options, vocab_size=model.config.decoder_vocab_size)
            num_beams = search.options["beam_size"]
            if not is_faster(self._num_weights, self._dtype, num_beams, batch_size):
                return f"faster for {self._num_weights:,} weights in {self._dtype} with `num_beams` {num_beams}"
            if search.start is None or self._start not in (None, search.start):
                return "CTranslate2 does not support another `decoder_start_token_id`"
            limits = target_limits(model, options, map(len, sources))
            longest = max(*map(len, sources), search.options["max_decoding_length"] + 1, *filter(None, limits))
            is_sinusoidal = model.config.position_embedding_type == "sinusoidal"
            limit = max(longest_target(model), SINUSOIDAL_POSITIONS) if is_sinusoidal else longest_target(model)
            if limit is not None and longest > limit:
                return f"the positions of CTranslate2 end at {limit}, and the longest text may have {longest}"
            if is_exact and return_scores:
                return "scores of CTranslate2 differ in the last digits"
            with self._lock:
                self._obstacle = self._load(model)
            return self._obstacle

        try:
            obstacle = find_obstacle()
        except (ImportError, ValueError, OSError) as error:
            # A system may also empty its folder for temporary files before the first call.
            obstacle = str(error)
        text = "CTranslate2 (faster for this model and search)"
        if obstacle is not None:
            # A reason may hold values of the call, such as long lists of ids.
            text = f"torch ({textwrap.shorten(obstacle.removesuffix('.'), 200)})"
        if text not in self._logged:
            self._logged.add(text)
            logger.info("Engine: %s", text)
        return self._engine if obstacle is None else model

    def _write_files(self, model: PreTrainedModel) -> str | None:
        """Write the copy's files. Return the reason if that is not possible."""
        num_bytes, free = 4 * self._num_weights, free_main_memory()
        if num_bytes > _MEMORY_SHARE * free:
            return f"a copy needs {num_bytes / 2**20:.0f} MiB of memory, and {free / 2**20:.0f} MiB are free"
        try:
            from metaphrase.conversion.ctranslate2 import find_obstacles, save_weights  # Needs an extra.

            if obstacles := find_obstacles(model.config):
                return f"CTranslate2 cannot express {'; '.join(obstacles)}"
            self._files = tempfile.TemporaryDirectory(prefix="metaphrase_ctranslate2_")
            save_weights(model, self._tokenizers, Path(self._files.name), self._map and self._map.path)
        except (ImportError, ValueError, OSError) as error:
            return str(error)
        return None

    def _load(self, model: PreTrainedModel) -> str | None:
        """Load the copy, unless it is loaded. Return the reason if it cannot be used."""
        if self._engine is None:
            if self._files is None and (reason := self._write_files(model)):
                return reason
            from metaphrase.engines.ctranslate2_engine import CTranslate2Engine  # Needs an extra.

            with self._files as folder:
                self._engine = CTranslate2Engine(folder, device="cpu", compute_type=self._dtype)
            self._engine.use_vmap = self._map is not None
            self._record = WeightRecord(model, [weight for weight in model.parameters() if not weight.is_inference()])
        if not self._record.is_current(model):
            self._engine = None
            return "the weights have changed since CTranslate2 loaded them"
        self._engine.generation_config = model.generation_config
        return None
