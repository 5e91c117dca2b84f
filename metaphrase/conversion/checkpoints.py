"""Helpers of all conversions and exports: find a checkpoint, compare its weights with those of a network, write a folder."""

import contextlib
import functools
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from metaphrase import modeling
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import (
    EXPORT_NAME,
    check_output,
    folder_in_one_step,
    refuse_outer_links,
    write_provenance,
)
from metaphrase.storage.loading import check_model_folder, load_pretrained, refuse_missing_folder
from metaphrase.storage.weight_files import Kind, PlannedTensor, WeightFiles, listed, weight_names, write_weights
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

OURS = MetaphraseConfig.model_type
# Our class by the end of the name of a class, theirs or ours, and the class of all other names.
OUR_CLASSES: dict[str, type[PreTrainedModel]] = {
    "ForSequenceClassification": modeling.MetaphraseForSequenceClassification,
    "ForTokenClassification": modeling.MetaphraseForTokenClassification,
    "ForQuestionAnswering": modeling.MetaphraseForQuestionAnswering,
    "EncoderModel": modeling.MetaphraseEncoderModel,
    "": modeling.MetaphraseForConditionalGeneration,
}
DEFAULT_SHARD_SIZE = "5GB"
PROVENANCE_NAME = "conversion.json"
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt", "*.spm", "*.model"),
    *("spiece.*", "chat_template*", "dict.txt", "bpe.codes"),
)
LICENCES = ("LICENSE*", "NOTICE*")
# Sinusoids have no limit, but a table has. A longer text raises an error.
SINUSOIDAL_POSITIONS = 4096
STORED_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

# Fields that few families have, with their values in all others.
RARE_FIELDS = {
    name: getattr(MetaphraseConfig, name)
    for name in (
        *("decoder_hidden_size", "decoder_num_key_value_heads", "encoder_layer_types", "decoder_layer_types"),
        *("norm_plus_one", "attn_logit_softcapping", "final_logit_softcapping", "embedding_norm_before_positions"),
        *("sliding_rope_theta", "merged_attention", "decoder_max_position_embeddings", "type_vocab_size"),
        *("head_transform", "decoder_self_attention"),
    )
}


def find_folder(source: str | os.PathLike, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, which is downloaded if it is a name on the Hub."""
    name = os.fspath(source)
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise MetaphraseError(f"`source` must be a folder, or a model file of Marian, got {name!r}.")
    refuse_missing_folder(name, "source")
    files = ["*.json", "*.safetensors", *TOKENIZER_FILES, *LICENCES, f"{TARGET_SUBFOLDER}/*"]
    # Folders hold a run's checkpoints or other formats. A star also matches a slash.
    options = {"revision": revision, "ignore_patterns": ["*/*.safetensors", "*/*.bin"]}
    folder = Path(snapshot_download(name, allow_patterns=files, **options))
    # Many models have their weights in both formats.
    files.append("pytorch_model*.bin")
    return folder if weight_names(folder) else Path(snapshot_download(name, allow_patterns=files, **options))


def new_folder(
    output: Path, sources: Sequence[Path], overwrite: bool, mark: str, action: str
) -> contextlib.AbstractContextManager[Path]:
    """Yield the folder that becomes `output`, which `check_output` checks."""
    return folder_in_one_step(output, functools.partial(check_output, output, sources, overwrite, mark, action))


def copy_files(folder: Path, output: Path, patterns: Sequence[str], name: str = "") -> None:
    """Copy the files of a folder, or of its folder `name`, whose names match a pattern."""
    for path in sorted({path for pattern in patterns for path in (folder / name).glob(pattern)}):
        if path.is_file():
            refuse_outer_links(folder, [path], "source")
            (output / name).mkdir(exist_ok=True)
            shutil.copyfile(path, output / name / path.name)


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with names and shapes of weights, but without memory for them."""
    with torch.device("meta"):
        return model_class(config)


def stored_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights in a model's checkpoint. Tied weights are stored once."""
    ignored = "|".join(model._keys_to_ignore_on_save or ["$^"])
    names = [name for name in model.state_dict() if name not in model.all_tied_weights_keys]
    return [name for name in names if not re.search(ignored, name)]


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise MetaphraseError(f"The weight `{name}` must have the shape {expected}, got {shape}.")


def check_names(needed: Iterable[str], stored: Container[str], allowed: Container[str] | None = None) -> None:
    """Refuse weights of which some needed ones are missing, or that hold others than the allowed ones."""
    missing = [name for name in needed if name not in stored]
    further = [] if allowed is None else sorted(name for name in stored if name not in allowed)
    for problem, names in (("are missing", missing), ("have no place in the model", further)):
        if names:
            raise MetaphraseError(f"Weights {problem}: {listed(names)}.")


def kind_of_class(architectures: Sequence[str] | None) -> str:
    """Return the key of `OUR_CLASSES` for the `architectures` of a configuration."""
    name, *_ = architectures or [""]
    return next(ending for ending in OUR_CLASSES if name.endswith(ending))


def our_skeleton(folder: Path, weights: WeightFiles) -> PreTrainedModel:
    """Return our model of a folder without memory for its weights, after checking names and shapes of those in the files."""
    config = MetaphraseConfig.from_pretrained(folder)
    model = skeleton(OUR_CLASSES[kind_of_class(config.architectures)], config)
    our_shapes, names = shapes(model), stored_names(model)
    check_names(names, weights.kinds, our_shapes)
    for name in names:
        check_shape(name, weights.kinds[name].shape, our_shapes[name])
    return model


def write_ours(
    output: Path,
    model: PreTrainedModel,
    planned: Mapping[str, PlannedTensor],
    generation: GenerationConfig,
    max_shard_size: int | str,
) -> None:
    """Write configuration, code, generation settings and planned weights of our model, whose own weights are not read."""
    model.config.architectures = [type(model).__name__]
    custom_object_save(model, output, config=model.config)
    model.config.save_pretrained(output)
    generation.save_pretrained(output)
    write_weights(output, planned, max_shard_size)


def rename_weights(weights: WeightFiles, new_name: Callable[[str], str]) -> None:
    """Give the weights of a checkpoint the names that a function makes of theirs."""
    load, kinds = weights.load, weights.kinds
    stored = {new_name(name): name for name in kinds}
    weights.load = lambda name: load(stored[name])
    weights.kinds = {name: kinds[inner] for name, inner in stored.items()}


class TorchWeights(WeightFiles):
    """The weights of a folder in torch's files, `pytorch_model.bin`, all of them in memory."""

    def __init__(self, folder: Path, names: list[str]):
        self.folder, tensors = folder, {}
        for path in (folder / name for name in names):
            try:
                # A file with anything but tensors is refused, and runs no code. Only files of torch 1.6 and later can be mapped.
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
                tensors |= {name: tensor.detach() for name, tensor in content.items()}
            except Exception as error:
                # A damaged pickle raises errors of all kinds, such as IndexError and UnicodeDecodeError.
                text = f"{path} must be a whole file of named tensors alone: other content could run code."
                raise MetaphraseError(text) from error
        self.load = tensors.__getitem__
        self.kinds = {
            name: Kind(STORED_TYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in sorted(tensors.items())
        }


def export_folder(
    source: str | os.PathLike,
    output: str | os.PathLike,
    overwrite: bool,
    write: Callable[[PreTrainedModel, TokenizerPair, Path], None],
    obstacles_of: Callable[[MetaphraseConfig], list[str]],
    provenance: dict[str, str],
    **load_options,
) -> Path:
    """Export a Metaphrase model, which is loaded with `load_options`, to a folder that appears only when it is complete.

    `write` writes the model itself, and `obstacles_of` returns the options that the format, `to` in `provenance`, cannot express.
    """
    source, output = os.fspath(source), Path(output)
    sources = [Path(source)] if os.path.isdir(source) else []
    with new_folder(output, sources, overwrite, EXPORT_NAME, "exported") as partial:
        # Refuses a model before reading its weights.
        check_model_folder(source)
        config = MetaphraseConfig.from_pretrained(source)
        if obstacles := obstacles_of(config):
            raise MetaphraseError(f"The format {provenance['to']} cannot express {'; '.join(obstacles)}.")
        model = load_pretrained(source, config=config, trust_remote_code=False, **load_options).eval()
        tokenizers = TokenizerPair.from_pretrained(source)
        tokenizers.save_pretrained(partial)
        write(model, tokenizers, partial)
        model.generation_config.save_pretrained(partial)
        write_provenance(partial / EXPORT_NAME, source, **{"from": OURS}, **provenance)
    return output


def position_table(positions: nn.Module, config: MetaphraseConfig) -> torch.Tensor:
    """Return the positions to add to the embeddings, (positions, H)."""
    length = max(config.max_position_embeddings, SINUSOIDAL_POSITIONS)
    if config.position_embedding_type == "learned":
        length = positions.num_embeddings - positions.offset
    return positions(torch.arange(length)[None], None)[0].detach()
