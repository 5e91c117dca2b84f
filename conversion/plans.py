"""Plans: which tensor of a checkpoint becomes which of another, checked to the last name before anything is written."""

import logging
import re
from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from metaphrase.conversion.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, Family, Place
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.weight_files import Kind, Planned, WeightFiles, listed

logger = logging.getLogger(__name__)

_EMBEDDINGS = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)
_HEAD_PARTS = ("lm_head.", "final_logits_bias")


class NamedWeights:
    """The weights of a checkpoint of a family by the names of its class with a head, though it be saved without one."""

    def __init__(self, files: WeightFiles, prefix: str):
        self._files = files
        has_prefix = any(name.startswith(prefix) for name in files.kinds)
        self.names = {
            name if has_prefix or name.startswith(_HEAD_PARTS) else prefix + name: name for name in files.kinds
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(self.names[name])

    def kind(self, name: str) -> Kind:
        return self._files.kinds[self.names[name]]


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model without memory for its weights: it knows their names and shapes."""
    with torch.device("meta"):
        return model_class(config)


def stored_names(model: PreTrainedModel) -> list[str]:
    """The names of a model's weights that are kept in a checkpoint, each of the tied ones once."""
    ignored = model._keys_to_ignore_on_save or ()
    tied = model.all_tied_weights_keys
    return [
        name
        for name in model.state_dict()
        if name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]


def plan_ours(family: Family, ours: PreTrainedModel, weights: NamedWeights) -> dict[str, Planned]:
    """What our weights are made of.

    Args:
        family: Of the checkpoint.
        ours: The skeleton of our model.
        weights: The checkpoint's.

    Raises:
        ValueError: If weights are missing, or have another shape or whole numbers.
    """
    config, shapes = ours.config, {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    places = {
        name: Place(family.embedding_name(name, weights)) if name in _EMBEDDINGS else family.place(name, config)
        for name in stored_names(ours)
    }
    _refuse("are missing", (place.name for place in places.values() if place.name not in weights))
    known = {place.name for place in places.values()} | family.ignorable(config)
    known.update(*family.embedding_names.values())
    if left_over := [name for name in weights.names if name not in known]:
        # The family's own class does not read them either.
        logger.warning("Weights that the family's class does not have are left behind: %s.", listed(left_over))
    planned = {}
    for name, place in places.items():
        kind = weights.kind(place.name)
        if not kind.is_floating_point:
            raise ValueError(f"The weight `{place.name}` must be of floating point, got {kind.dtype}.")
        _check_shape(place.name, kind.shape, place.their_shape(shapes[name]))
        planned[name] = Planned(kind.nbytes // place.parts, _taking(place, weights.read))
    return planned


def plan_theirs(
    family: Family, ours: PreTrainedModel, theirs: PreTrainedModel, weights: WeightFiles
) -> dict[str, Planned]:
    """What the weights of a family's class are made of.

    Args:
        family: Whose class it is.
        ours: The skeleton of our model.
        theirs: The skeleton of the family's.
        weights: Our checkpoint's.

    Raises:
        ValueError: If weights of ours are missing, are left over, or have another shape.
    """
    config, stored = ours.config, stored_names(ours)
    our_shapes = {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    their_shapes = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    _refuse("are missing", (name for name in stored if name not in weights.kinds))
    _refuse("have no place in the model", (name for name in weights.kinds if name not in our_shapes))
    for name in stored:
        _check_shape(name, weights.kinds[name].shape, our_shapes[name])

    homes: dict[str, list[tuple[Place, str]]] = {}
    for name in stored:
        if name not in _EMBEDDINGS:
            place = family.place(name, config)
            homes.setdefault(place.name, []).append((place, name))
    embeddings = _embeddings_of(family, config)
    needed = stored_names(theirs)
    # What is tied or remade by default, but is not so in this model.
    needed += [name for name in homes if name not in needed]
    own_head = family.embedding_names[HEAD][0]
    if not config.tie_word_embeddings and own_head not in needed:
        needed.append(own_head)
    planned = {}
    for name in needed:
        sources = homes.get(name) or ([(Place(name), embeddings[name])] if name in embeddings else [])
        if sources:
            nbytes = sum(weights.kinds[source].nbytes for _, source in sources)
            nbytes += sum(place.unused_rows for place, _ in sources) * nbytes // max(1, their_shapes[name][0])
            planned[name] = Planned(nbytes, _giving(sources, weights.read))
        else:
            filled = family.fill(name, their_shapes[name], config)
            if filled is None:
                raise AssertionError(f"{family.name} has a weight {name} that nothing fills")
            dtype = weights.read(ENCODER_EMBEDDING).dtype
            planned[name] = Planned(filled.nbytes, _constantly(filled.to(dtype)))
    return planned


def _embeddings_of(family: Family, config: MetaphraseConfig) -> dict[str, str]:
    """For each name that a family has for an embedding, the stored weight of ours that it is."""
    decoder = ENCODER_EMBEDDING if config.share_embeddings else DECODER_EMBEDDING
    kept = {
        ENCODER_EMBEDDING: ENCODER_EMBEDDING,
        DECODER_EMBEDDING: decoder,
        HEAD: decoder if config.tie_word_embeddings else HEAD,
    }
    # A name that stands second belongs to none of the three: what is shared, where they are one.
    shared = {names[1]: ENCODER_EMBEDDING for names in family.embedding_names.values()}
    return shared | {names[0]: kept[ours] for ours, names in family.embedding_names.items()}


def _taking(place: Place, read: Callable[[str], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: place.take(read(place.name))


def _giving(sources: Iterable[tuple[Place, str]], read: Callable[[str], torch.Tensor]) -> Callable[[], torch.Tensor]:
    ordered = sorted(sources, key=lambda pair: pair[0].part)

    def make() -> torch.Tensor:
        parts = [place.give(read(name)) for place, name in ordered]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return make


def _constantly(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _check_shape(name: str, given: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if given != expected:
        raise ValueError(f"The weight `{name}` must have the shape {expected}, got {given}.")


def _refuse(what: str, names: Iterable[str]) -> None:
    """Raises if there are names."""
    names = list(names)
    if names:
        raise ValueError(f"Weights {what}: {listed(names)}.")
