"""Conversion of a checkpoint folder, one tensor at a time."""

import contextlib
import functools
import logging
import os
from pathlib import Path

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from metaphrase.conversion import checkpoints
from metaphrase.conversion.families import FAMILIES
from metaphrase.conversion.families.family import ENCODER_EMBEDDING, HEAD, Counterpart, Family, refuse_obstacles, rename
from metaphrase.conversion.marian import MARIAN_FILE, find_model_file, read_marian, write_marian
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import read_json, write_json, write_provenance
from metaphrase.storage.loading import check_model_folder
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, listed, weight_names, write_weights
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

logger = logging.getLogger(__name__)

# Their classes by the kind of class.
_CLASSES = {
    "ForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "ForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "ForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "EncoderModel": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING,
    "": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}
# T5's classes with a head have their weights in a part of this name.
_PART = "transformer."
# Beginnings of the weights of a head. T5Gemma has the last one.
_HEADS = ("classification_head.", "classifier.", "qa_outputs.", "score.")
# Pipelines and heads read these fields of every family's configuration.
_TASK_FIELDS = ("prefix", "task_specific_params", "id2label", "label2id", "problem_type")
# transformers does not list these unless sentencepiece is installed.
_NEED_SENTENCEPIECE = {"marian": "MarianTokenizer", "m2m_100": "M2M100Tokenizer"}
# For these transformers reads tokenizer.json as it is, whatever class a folder names.
_GENERIC_TOKENIZERS = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast")


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    to: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = checkpoints.DEFAULT_SHARD_SIZE,
) -> Path:
    """Convert a checkpoint of a known family to Metaphrase, or a Metaphrase checkpoint to a family.

    Weights keep their dtype. They are read from mapped files and written file by file: one file's tensors are in memory
    at a time. Tokenizers and generation settings are copied. The folder appears only when it is complete.

    Args:
        source: Folder or Hub id of a model, in safetensors or in a `pytorch_model.bin`. Also a model file of Marian, .npz or
            .bin, with its vocabularies beside it, or the folder of these files.
        to: `model_type` of the family to write, or marian-npz for a file of Marian. None or metaphrase for a checkpoint of
            another family.
        max_shard_size: Limit of a weight file, in bytes or such as 500MB or 5GB.

    Raises:
        MetaphraseError: If the family is unknown, the model does not fit it, or the weights are not those of its class.
    """
    marian_file = find_model_file(source)
    folder = checkpoints.find_folder(source, revision) if marian_file is None else marian_file.parent
    with checkpoints.new_folder(Path(output), [folder], overwrite, checkpoints.PROVENANCE_NAME, "converted") as partial:
        check_model_folder(folder)
        config = read_json(folder / CONFIG_NAME) if marian_file is None else {"model_type": MARIAN_FILE}
        model_type = config.get("model_type")
        if model_type != checkpoints.OURS and to not in (None, checkpoints.OURS):
            raise MetaphraseError(f"`to` must be left out for a {model_type}, got {to!r}: convert to metaphrase first.")
        if marian_file is not None:
            read_marian(marian_file, partial, max_shard_size)
        elif to == MARIAN_FILE:
            write_marian(folder, partial)
        else:
            _convert_family(folder, config, to, partial, max_shard_size)
        checkpoints.copy_files(folder, partial, (*checkpoints.LICENCES, "*.spm"))
        provenance = {"from": model_type, "to": to or checkpoints.OURS}
        write_provenance(partial / checkpoints.PROVENANCE_NAME, source, **provenance)
    return Path(output)


def _convert_family(folder: Path, config: dict, to: str | None, output: Path, max_shard_size: int | str) -> None:
    """Write a checkpoint of a family as ours, or ours as that of the family `to`."""
    model_type = config.get("model_type")
    field, name = ("to", to) if model_type == checkpoints.OURS else ("model_type", model_type)
    if name not in FAMILIES:
        raise MetaphraseError(f"`{field}` must be one of {', '.join(FAMILIES)}, got {name!r} for {folder}.")
    family = FAMILIES[name].of_model(config)
    with contextlib.ExitStack() as files:
        names = weight_names(folder, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        is_torch = names and not weight_names(folder)
        weights = checkpoints.TorchWeights(folder, names) if is_torch else WeightFiles(folder, files)
        # Older checkpoints keep the generation settings in the model's config.
        is_old = not (folder / GENERATION_CONFIG_NAME).is_file()
        names = {"config_file_name": CONFIG_NAME, "_from_model_config": True} if is_old else {}
        generation = GenerationConfig.from_pretrained(folder, **names)
        if model_type == checkpoints.OURS:
            planned = _write_their_config(family, folder, weights, output)
            generation.save_pretrained(output)
            write_weights(output, planned, max_shard_size)
        else:
            ours, planned = _plan_ours(family, folder, weights, generation.decoder_start_token_id)
            checkpoints.write_ours(output, ours, planned, generation, max_shard_size)
    for subfolder in ("", TARGET_SUBFOLDER):
        checkpoints.copy_files(folder, output, checkpoints.TOKENIZER_FILES, subfolder)
    settings = output / "tokenizer_config.json"
    content = read_json(settings) if settings.is_file() else {}
    if model_type == "encoder-decoder":
        model_type = config["encoder"]["model_type"]
    named_class = content.get("tokenizer_class") or config.get("tokenizer_class")
    tokenizer_class = _tokenizer_class(model_type, named_class)
    has_tokenizer = any(True for pattern in checkpoints.TOKENIZER_FILES for _ in output.glob(pattern))
    if has_tokenizer and tokenizer_class is not None:
        # Without a name transformers would choose by the model type, which has changed.
        write_json(settings, content | {"tokenizer_class": tokenizer_class})


def _plan_ours(
    family: Family, folder: Path, weights: WeightFiles, start: int | None
) -> tuple[PreTrainedModel, dict[str, PlannedTensor]]:
    """Return our skeleton of a family's checkpoint, and the planned weights. `start` is that of older checkpoints."""
    theirs = CONFIG_MAPPING[family.name].from_pretrained(folder)
    if getattr(theirs, "decoder_start_token_id", None) is None:
        theirs.decoder_start_token_id = start
    checkpoints.rename_weights(weights, lambda name: name.removeprefix(_PART))
    kind = checkpoints.kind_of_class(theirs.architectures)
    config = family.read_config(theirs, weights)
    if kind:
        config.tie_word_embeddings = theirs.tie_word_embeddings
    _copy_task_fields(theirs, config)
    ours = checkpoints.skeleton(checkpoints.OUR_CLASSES[kind], config)
    our_shapes = checkpoints.shapes(ours)
    counterparts = {
        name: Counterpart(family.embedding_name(full, weights))
        if (full := _full_name(name)) in family.embedding_names
        else _counterpart(family, full, config)
        for name in checkpoints.stored_names(ours)
    }
    known = {counterpart.name for counterpart in counterparts.values()}
    checkpoints.check_names(sorted(known), weights.kinds)
    known = known.union(*family.embedding_names.values())
    names = [name for name in weights.kinds if not name.startswith(family.ignored_prefixes)]
    left_over = [name for name in names if name.replace(*family.copy_name) not in known]
    if heads := [name for name in left_over if name.startswith(_HEADS)]:
        raise MetaphraseError(f"The head of {theirs.architectures} cannot be converted, got {listed(heads)}.")
    if left_over:
        # The family's own class does not read them either.
        logger.warning("Weights that the family's class does not have are left behind: %s.", listed(left_over))
    planned = {}
    for name, counterpart in counterparts.items():
        kind = weights.kinds[counterpart.name]
        if kind.dtype not in checkpoints.STORED_TYPES.values():
            hint = "load it with transformers, and call `dequantize` and `save_pretrained`"
            raise MetaphraseError(f"A checkpoint must hold plain weights, got `{name}` in {kind.dtype}: {hint}.")
        checkpoints.check_shape(counterpart.name, kind.shape, counterpart.their_shape(our_shapes[name]))
        planned[name] = PlannedTensor(kind.nbytes, lambda item=counterpart: item.to_ours(weights.read(item.name)))
    return ours, planned


def _write_their_config(family: Family, folder: Path, weights: WeightFiles, output: Path) -> dict[str, PlannedTensor]:
    """Write a family's configuration of our checkpoint, and return the planned weights."""
    # Options in the way are named before weights are checked.
    config = MetaphraseConfig.from_pretrained(folder)
    fields = family.write_config(config)
    kind = checkpoints.kind_of_class(config.architectures)
    if kind in ("ForTokenClassification", "EncoderModel"):
        fields["is_encoder_decoder"] = False
    theirs = CONFIG_MAPPING[family.name](dtype=config.dtype, **fields)
    # A T5Gemma 2 labels tokens with its decoder.
    if type(theirs) not in _CLASSES[kind] or (family.name == "t5gemma2" and kind == "ForTokenClassification"):
        raise MetaphraseError(f"`to` must be a family with this head, got {family.name!r} for {config.architectures}.")
    if kind == "ForSequenceClassification":
        refuse_obstacles(config, {name: (value,) for name, value in family.classifier.items()}, f"no {family.name}")
    model_class = _CLASSES[kind][type(theirs)]
    theirs.architectures = [model_class.__name__]
    _copy_task_fields(config, theirs)
    ours = checkpoints.our_skeleton(folder, weights)
    # LED's class completes the configuration.
    their_skeleton = checkpoints.skeleton(model_class, theirs)
    theirs.save_pretrained(output)
    # transformers' T5 always writes true here, and older versions believe it.
    written = read_json(output / CONFIG_NAME) | {"tie_word_embeddings": fields["tie_word_embeddings"]}
    write_json(output / CONFIG_NAME, written, sort_keys=True)
    our_shapes, embeddings = checkpoints.shapes(ours), family.embedding_names
    shapes = checkpoints.shapes(their_skeleton)
    their_shapes = {name.replace(*family.file_name): shape for name, shape in shapes.items()}
    # Our names of the class that generates.
    stored = {_full_name(name): name for name in checkpoints.stored_names(ours)}
    counterparts = {name: _counterpart(family, name, config) for name in stored if name not in embeddings}
    by_name = {counterpart.name: counterpart for counterpart in counterparts.values()}
    sources = family.stored_embeddings(config) | {counterpart.name: name for name, counterpart in counterparts.items()}
    sources = {theirs: stored[name] for theirs, name in sources.items() if name in stored}
    # The last ones are tied or recomputed by default, but not in this model.
    heads = [] if config.tie_word_embeddings or kind else [embeddings[HEAD][0]]
    part = family.prefix if kind == "EncoderModel" else ""
    their_names = [name.replace(*family.file_name) for name in checkpoints.stored_names(their_skeleton)]
    named = {part + name.removeprefix(_PART) for name in their_names}
    planned = {}
    for name in [*their_names, *(name for name in dict.fromkeys([*by_name, *heads]) if name not in named)]:
        original = part + name.removeprefix(_PART).replace(*family.copy_name)
        if (our_name := sources.get(original)) is not None:
            counterpart = by_name.get(original, Counterpart(original))
            nbytes = weights.kinds[our_name].nbytes
            nbytes += counterpart.unused_rows * nbytes // our_shapes[our_name][0]
            make = functools.partial(lambda name, theirs: theirs.to_theirs(weights.read(name)), our_name, counterpart)
            planned[name] = PlannedTensor(nbytes, make)
        else:
            tensor = family.make_weight(name, their_shapes[name], config)
            tensor = tensor.to(weights.read(stored[ENCODER_EMBEDDING]).dtype)
            planned[name] = PlannedTensor(tensor.nbytes, lambda tensor=tensor: tensor)
    return planned


def _full_name(name: str) -> str:
    """Return the name in the class that generates of one of our weights. The encoder alone has no part `model`."""
    return f"model.{name}" if name.startswith("encoder.") else name


def _counterpart(family: Family, name: str, config: MetaphraseConfig) -> Counterpart:
    """Return the family's weight for one of ours, which may belong to a head."""
    if name.startswith(_HEADS):
        return Counterpart(rename(name, family.head_names))
    return family.counterpart(name, config)


def _copy_task_fields(source: PreTrainedConfig, target: PreTrainedConfig) -> None:
    target.update({field: getattr(source, field) for field in _TASK_FIELDS if getattr(source, field, None)})


def _tokenizer_class(model_type: str, named_class: str | None) -> str | None:
    """Return the tokenizer class that transformers would choose for a folder, which may name a class itself."""
    family_class = TOKENIZER_MAPPING_NAMES.get(model_type) or _NEED_SENTENCEPIECE.get(model_type)
    return family_class if family_class in _GENERIC_TOKENIZERS else named_class or family_class
