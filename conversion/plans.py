"""Plans: which stored tensor becomes which. Names and shapes are checked before anything is written."""

import functools
import logging
import re

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from metaphrase.conversion.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, Counterpart, Family, Weights
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, listed

logger = logging.getLogger(__name__)

_EMBEDDINGS = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with names and shapes of weights, but without memory for them."""
    with torch.device("meta"):
        return model_class(config)


def stored_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights in a model's checkpoint. Tied weights are stored once."""
    ignored = model._keys_to_ignore_on_save or ()
    tied = model.all_tied_weights_keys
    return [
        name
        for name in model.state_dict()
        if name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]


def plan_ours(family: Family, ours: PreTrainedModel, weights: Weights) -> dict[str, PlannedTensor]:
    """Plan our weights from a family's checkpoint.

    Args:
        family: The family of the checkpoint.
        ours: The skeleton of our model.
        weights: The checkpoint's weights.

    Raises:
        ValueError: If weights are missing, have a wrong shape or are integers.
    """
    config, shapes = ours.config, _shapes(ours)
    counterparts = {
        name: Counterpart(family.embedding_name(name, weights))
        if name in _EMBEDDINGS
        else family.counterpart(name, config)
        for name in stored_names(ours)
    }
    _refuse("are missing", [theirs.name for theirs in counterparts.values() if theirs.name not in weights])
    known = {theirs.name for theirs in counterparts.values()} | family.ignorable_weights(config)
    known.update(*family.embedding_names.values())
    if left_over := [name for name in weights.names if name not in known]:
        # The family's own class does not read them either.
        logger.warning("Weights that the family's class does not have are left behind: %s.", listed(left_over))
    planned = {}
    for name, theirs in counterparts.items():
        kind = weights.kind(theirs.name)
        if not kind.is_floating_point:
            raise ValueError(f"The weight `{theirs.name}` must be of floating point, got {kind.dtype}.")
        _check_shape(theirs.name, kind.shape, theirs.their_shape(shapes[name]))
        make = functools.partial(lambda theirs: theirs.to_ours(weights.read(theirs.name)), theirs)
        planned[name] = PlannedTensor(kind.nbytes // theirs.parts, make)
    return planned


def plan_theirs(
    family: Family, ours: PreTrainedModel, theirs: PreTrainedModel, weights: WeightFiles
) -> dict[str, PlannedTensor]:
    """Plan the weights of a family's class from our checkpoint.

    Args:
        family: The family to write.
        ours: The skeleton of our model.
        theirs: The skeleton of the family's model.
        weights: Our checkpoint's weights.

    Raises:
        ValueError: If our weights are missing, left over or of a wrong shape.
    """
    config, stored = ours.config, stored_names(ours)
    our_shapes, their_shapes = _shapes(ours), _shapes(theirs)
    _refuse("are missing", [name for name in stored if name not in weights.kinds])
    _refuse("have no place in the model", [name for name in weights.kinds if name not in our_shapes])
    for name in stored:
        _check_shape(name, weights.kinds[name].shape, our_shapes[name])

    # Their name to their parts, each with the name of ours.
    parts: dict[str, list[tuple[Counterpart, str]]] = {}
    for name in stored:
        if name not in _EMBEDDINGS:
            counterpart = family.counterpart(name, config)
            parts.setdefault(counterpart.name, []).append((counterpart, name))
    # The last ones are tied or recomputed by default, but not in this model.
    heads = [] if config.tie_word_embeddings else [family.embedding_names[HEAD][0]]
    needed = dict.fromkeys([*stored_names(theirs), *parts, *heads])
    embeddings = {name: [(Counterpart(name), source)] for name, source in _embedding_sources(family, config).items()}
    parts = embeddings | parts
    planned = {}
    for name in needed:
        if sources := parts.get(name):
            nbytes = sum(weights.kinds[our_name].nbytes for _, our_name in sources)
            nbytes += sum(part.unused_rows for part, _ in sources) * nbytes // max(1, their_shapes[name][0])
            planned[name] = PlannedTensor(nbytes, functools.partial(_read_theirs, sources, weights))
        else:
            tensor = family.make_weight(name, their_shapes[name], config)
            if tensor is None:
                raise AssertionError(f"{family.name} has a weight {name} without a counterpart")
            tensor = tensor.to(weights.read(ENCODER_EMBEDDING).dtype)
            planned[name] = PlannedTensor(tensor.nbytes, lambda tensor=tensor: tensor)
    return planned


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _embedding_sources(family: Family, config: MetaphraseConfig) -> dict[str, str]:
    """Return our stored weight for each of the family's names of an embedding."""
    decoder = ENCODER_EMBEDDING if config.share_embeddings else DECODER_EMBEDDING
    stored = {
        ENCODER_EMBEDDING: ENCODER_EMBEDDING,
        DECODER_EMBEDDING: decoder,
        HEAD: decoder if config.tie_word_embeddings else HEAD,
    }
    # The second name of each is the shared weight.
    shared = {names[1]: ENCODER_EMBEDDING for names in family.embedding_names.values()}
    return shared | {names[0]: stored[ours] for ours, names in family.embedding_names.items()}


def _read_theirs(sources: list[tuple[Counterpart, str]], weights: WeightFiles) -> torch.Tensor:
    ordered = sorted(sources, key=lambda source: source[0].part)
    parts = [counterpart.to_theirs(weights.read(name)) for counterpart, name in ordered]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"The weight `{name}` must have the shape {expected}, got {shape}.")


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        raise ValueError(f"Weights {problem}: {listed(names)}.")
