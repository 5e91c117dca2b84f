"""Trimmed vocabulary: a model with only the tokens that some texts use. Its other weights stay."""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.conversion import checkpoints
from metaphrase.conversion.families.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, HEAD_BIAS
from metaphrase.conversion.folders import convert
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.storage.folders import read_json, write_json, write_provenance
from metaphrase.storage.loading import check_model_folder
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import iterate_lines

logger = logging.getLogger(__name__)

_ROWS = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD, HEAD_BIAS)
# Fields of settings with ids of tokens, beside those that end in `_token_id`.
_ID_LISTS = ("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")
_TEXTS_PER_BATCH = 10_000


def trim_vocabulary(
    source: str | os.PathLike,
    output: str | os.PathLike,
    files: Sequence[str | os.PathLike],
    *,
    revision: str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = checkpoints.DEFAULT_SHARD_SIZE,
) -> Path:
    """Write a Metaphrase model with only the tokens that texts use. A model of a known family is converted first.

    Special tokens, language codes, added tokens, and the bytes and characters of the texts stay, too. The texts keep their
    tokens, and these tokens keep their logits. Ids change.

    Args:
        source: Folder or Hub id of a model with one fast tokenizer.
        files: Text files in the languages to keep, plain or `.gz`. A tab ends a text.
        max_shard_size: Limit of a weight file, in bytes or such as 500MB or 5GB.

    Raises:
        MetaphraseError: If the files hold no text, or the model's tokenizer cannot be trimmed.
    """
    folder = checkpoints.find_folder(source, revision)
    with (
        checkpoints.new_folder(Path(output), [folder], overwrite, checkpoints.PROVENANCE_NAME, "converted") as partial,
        contextlib.ExitStack() as opened,
    ):
        check_model_folder(folder)
        fields = read_json(folder / CONFIG_NAME)
        tokenizers = TokenizerPair.from_pretrained(folder)
        tokenizer = tokenizers.source
        if not tokenizer.is_fast or not tokenizers.is_joint:
            name = "two tokenizers" if tokenizer.is_fast else f"a {type(tokenizer).__name__}, which runs in Python"
            text = "Take a model such as NLLB, mBART or mT5, or distill the model into a student."
            raise MetaphraseError(f"`trim_vocabulary` needs one fast tokenizer for both sides, got {name}. {text}")
        texts = (text for line in iterate_lines(files) for text in line.split("\t") if text.strip())
        first_texts = [*itertools.islice(texts, _TEXTS_PER_BATCH)]
        if not first_texts:
            names = ", ".join(map(str, files))
            raise MetaphraseError(f"`trim_vocabulary` must name files with texts, got no text in {names}.")
        used: set[int] = set()
        # Texts before sources, such as T5's.
        tasks = [fields, *(fields.get("task_specific_params") or {}).values()]
        prefixes = [task["prefix"] for task in tasks if task.get("prefix")]
        texts = itertools.chain(prefixes, first_texts, texts)
        while batch := [*itertools.islice(texts, _TEXTS_PER_BATCH)]:
            used.update(*tokenizers.encode_sources(batch))
        used |= _needed_ids(tokenizer, used)
        whole = folder
        if fields["model_type"] != checkpoints.OURS:
            whole = convert(folder, partial / "whole", max_shard_size=max_shard_size)
        weights = WeightFiles(whole, opened)
        config = checkpoints.our_skeleton(whole, weights).config.to_dict()
        generation = read_json(whole / GENERATION_CONFIG_NAME)
        for settings in (config, generation):
            _map_ids(settings, used.add)
        ids, size = sorted(used), config["vocab_size"]
        new_ids = {index: new for new, index in enumerate(ids)}
        config = _map_ids(config, new_ids.get) | {"vocab_size": len(ids), "decoder_vocab_size": len(ids)}
        model = checkpoints.skeleton(MetaphraseForConditionalGeneration, MetaphraseConfig.from_dict(config))
        planned = {}
        for name in checkpoints.stored_names(model):
            kind, rows = weights.kinds[name], ids if name in _ROWS else slice(None)
            nbytes = kind.nbytes // kind.shape[0] * len(ids) if name in _ROWS else kind.nbytes
            planned[name] = PlannedTensor(nbytes, lambda name=name, rows=rows: weights.read(name)[rows])
        generation = GenerationConfig.from_dict(_map_ids(generation, new_ids.get))
        checkpoints.write_ours(partial, model, planned, generation, max_shard_size)
        tokenizers.save_pretrained(partial)
        path = partial / "tokenizer.json"
        write_json(path, _trim_state(read_json(path), new_ids))
        # Some classes make a vocabulary of their own as they load.
        trimmed, vocabulary = TokenizerPair.from_pretrained(partial), tokenizer.get_vocab()
        remaining = {token: new_ids[index] for token, index in vocabulary.items() if index in new_ids}
        rows = [[new_ids[index] for index in row] for row in tokenizers.encode_sources(first_texts)]
        if trimmed.source.get_vocab() != remaining or trimmed.encode_sources(first_texts) != rows:
            raise MetaphraseError(f"A {type(tokenizer).__name__} cannot be trimmed: it loads with other tokens.")
        checkpoints.copy_files(folder, partial, checkpoints.LICENCES)
        shutil.rmtree(partial / "whole", ignore_errors=True)
        provenance = {"from": fields["model_type"], "to": checkpoints.OURS}
        write_provenance(partial / checkpoints.PROVENANCE_NAME, source, **provenance)
    before, after = (sum(tensor.nbytes for tensor in tensors.values()) / 1e6 for tensors in (weights.kinds, planned))
    logger.info("Kept %d of %d tokens. The weights have %.1f MB, %.1f MB less.", len(ids), size, after, before - after)
    return Path(output)


def _needed_ids(tokenizer: PreTrainedTokenizerBase, used: Iterable[int]) -> set[int]:
    """Return the ids of special and added tokens, and those without which a used token, byte or character is unknown."""
    state, vocabulary = json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.get_vocab()
    model, names = state["model"], {index: token for token, index in vocabulary.items()}
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *getattr(tokenizer, "lang_code_to_id", ())}
    tokens = {names[index] for index in used} - special
    characters = set("".join(tokens))
    if '"ByteLevel"' in json.dumps([state["normalizer"], state["pre_tokenizer"]]):
        characters |= {*pre_tokenizers.ByteLevel.alphabet()}
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    tokens |= {token for token in vocabulary if token.removeprefix(prefix).removesuffix(suffix) in characters}
    if model.get("byte_fallback"):
        tokens |= {f"<0x{byte:02X}>" for byte in range(256)}
    if model["type"] == "BPE":
        ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
        tokens |= {part for token in [*tokens] for part in _merged(token, ranks, suffix)}
    if model["type"] == "Unigram":
        # An unknown character costs more than the least probable piece.
        tokens.add(min(model["vocab"], key=lambda entry: entry[1])[0])
    return {vocabulary[token] for token in tokens | special if token in vocabulary}


def _merged(token: str, ranks: Mapping[tuple[str, str], int], suffix: str) -> Iterator[str]:
    """Yield the tokens of which byte pair encoding makes a token, which do not depend on the text around."""
    stem = token.removesuffix(suffix)
    parts = [*stem[:-1], stem[-1:] + token[len(stem) :]]
    while True:
        yield from parts
        pairs = [(ranks[pair], index) for index, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            return
        _, index = min(pairs)
        parts[index : index + 2] = ["".join(parts[index : index + 2])]


def _map_ids(value: Any, function: Callable[[int], Any], name: str = "") -> Any:
    """Return settings in which a function has replaced each id of a token."""
    if isinstance(value, dict):
        return {key: _map_ids(inner, function, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_ids(inner, function, name) for inner in value]
    is_id = type(value) is int and (name.endswith("_token_id") or name in _ID_LISTS)
    return function(value) if is_id else value


def _trim_state(state: dict[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    model = state["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for index, entry in enumerate(model["vocab"]) if index in new_ids]
        model["unk_id"] = new_ids.get(model["unk_id"])
    else:
        model["vocab"] = {token: new_ids[index] for token, index in model["vocab"].items() if index in new_ids}
    if model["type"] == "BPE":
        model["merges"] = [merge for merge in model["merges"] if {*merge, "".join(merge)} <= model["vocab"].keys()]
    for token in state["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    processor = state["post_processor"] or {}
    for step in processor.get("processors", [processor]):
        for token in step.get("special_tokens", {}).values():
            token["ids"] = [new_ids[index] for index in token["ids"]]
        for name in {"cls", "sep"} & step.keys():
            step[name][1] = new_ids[step[name][1]]
    return state
