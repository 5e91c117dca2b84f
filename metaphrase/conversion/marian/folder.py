"""Conversion of a folder with files of Marian, and back."""

import contextlib
import functools
import logging
from pathlib import Path

from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save

from metaphrase.conversion.checkpoints import check_shape, refuse_weights, shapes, skeleton, stored_names
from metaphrase.conversion.marian.files import read_model_file, write_npz
from metaphrase.conversion.marian.network import (
    marian_name,
    marian_shape,
    read_config,
    to_marian,
    to_ours,
    write_options,
)
from metaphrase.conversion.marian.vocabulary import find_vocabularies, read_vocabularies, read_vocabulary_map
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, listed, write_weights
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME

logger = logging.getLogger(__name__)

# The name of this format, in the place of a family of transformers.
MARIAN_FILE = "marian-npz"


def read_marian(file: Path, output: Path, max_shard_bytes: int) -> None:
    """Write our checkpoint of a model file of Marian, with the vocabularies and the shortlist beside it."""
    tokenizers = read_vocabularies(find_vocabularies(file.parent))
    options, weights = read_model_file(file)
    config = read_config(options, tokenizers.target.pad_token_id, tokenizers.target.eos_token_id)
    if max(config.encoder_layers, config.decoder_layers) > len(weights):
        raise ValueError(f"`enc-depth` and `dec-depth` must fit the {len(weights)} weights of {file}.")
    config.architectures = [MetaphraseForConditionalGeneration.__name__]
    model = skeleton(MetaphraseForConditionalGeneration, config)
    decoder_layers = options.get("transformer-tied-layers") or range(1, config.decoder_layers + 1)
    if isinstance(decoder_layers, int | str) or len(decoder_layers) != config.decoder_layers:
        raise ValueError(f"`transformer-tied-layers` must name {config.decoder_layers} layers, got {decoder_layers}.")
    our_shapes = shapes(model)
    names = {name: marian_name(name, config, decoder_layers) for name in stored_names(model)}
    refuse_weights("are missing", [theirs for theirs in names.values() if theirs not in weights])
    refuse_weights("have no place in the model", sorted(weights.keys() - {*names.values()}))
    planned = {}
    for name, theirs in names.items():
        check_shape(theirs, weights[theirs].shape, marian_shape(name, our_shapes[name]))
        planned[name] = PlannedTensor(weights[theirs].nbytes, functools.partial(to_ours, name, weights[theirs]))
    custom_object_save(model, output, config=config)
    config.save_pretrained(output)
    # Marian writes no unknown token, and has the limit of 512 tokens in models of OPUS-MT.
    ids = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    suppressed = [tokenizers.target.unk_token_id]
    GenerationConfig(**ids, max_length=512, suppress_tokens=suppressed).save_pretrained(output)
    write_weights(output, planned, max_shard_bytes)
    tokenizers.save_pretrained(output)
    shortlists = sorted(file.parent.glob("lex*.bin"))
    if len(shortlists) == 1:
        read_vocabulary_map(shortlists[0], tokenizers).save(output / VOCABULARY_MAP_NAME, tokenizers)
    elif shortlists:
        logger.warning(
            "The shortlists are left behind: there must be one, got %s.", listed([p.name for p in shortlists])
        )


def write_marian(folder: Path, output: Path) -> None:
    """Write `model.npz` of a folder with our checkpoint."""
    config = MetaphraseConfig.from_pretrained(folder)
    options = write_options(config)
    model = skeleton(MetaphraseForConditionalGeneration, config)
    our_shapes, names = shapes(model), stored_names(model)
    arrays = {}
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        refuse_weights("are missing", [name for name in names if name not in weights.kinds])
        refuse_weights("have no place in the model", [name for name in weights.kinds if name not in our_shapes])
        for name in names:
            check_shape(name, weights.kinds[name].shape, our_shapes[name])
            theirs = marian_name(name, config, range(1, config.decoder_layers + 1))
            arrays[theirs] = to_marian(name, weights.read(name))
    write_npz(output / "model.npz", options, arrays)
    if not any(folder.glob("*.spm")):
        logger.warning("%s holds no vocabulary *.spm: put that of the model of Marian beside model.npz.", folder)
