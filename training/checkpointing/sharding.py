"""Sharded weights: what a model needs before its weights are shared out among devices, and to be whole again."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from metaphrase.storage.weight_files import weight_names
from metaphrase.training.adapters import import_peft, is_adapted


@contextlib.contextmanager
def _embeddings_hidden(model: nn.Module) -> Iterator[None]:
    names = [name for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, name)]
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def keep_embeddings_together(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Accelerator.prepare` so that all embeddings and the head belong to the model itself, not to units of their own.

    accelerate takes one embedding and the head out of the model (seen in 1.15). Another embedding that is tied to them is left
    behind then, which FSDP refuses from torch 2.13 on; and the loss, which reads the head's weight without calling the head,
    would find it sharded. The model itself is gathered from the start of a step to its end.
    """

    def prepare_together(*objects: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for model in objects:
                if isinstance(model, nn.Module):
                    stack.enter_context(_embeddings_hidden(model))
            return prepare(*objects, **options)

    return prepare_together


def _plain_class(model: nn.Module) -> type[nn.Module]:
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


@contextlib.contextmanager
def as_plain_class(model: nn.Module) -> Iterator[None]:
    """Gives a model the class back that it had before FSDP, so that it is saved with that class's code."""
    sharded = type(model)
    model.__class__ = _plain_class(model)
    try:
        yield
    finally:
        model.__class__ = sharded


def is_sharded(model: nn.Module) -> bool:
    """Whether a process holds a share alone of the weights, by FSDP or by DeepSpeed's third stage."""
    return isinstance(model, FSDPModule) or _is_partitioned(model)


def _is_partitioned(model: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """The shape of a weight, which one that DeepSpeed has shared out does not show."""
    return getattr(weight, "ds_shape", weight.shape)


def gather_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with whole weights of a sharded model, on each process. All processes must call it."""
    if _is_partitioned(model):
        state = gather_partitions(model)
    else:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # Its first weights are thrown away, and the random numbers for them must not be missed by the training. `from_config` would
    # share them out at once, where DeepSpeed does.
    with torch.random.fork_rng():
        whole = _fresh_model(model).to(model.device)
    whole.load_state_dict(state)
    whole.generation_config = model.generation_config
    return whole


def _fresh_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model like this one, an adapter included, with weights of its own."""
    if not is_adapted(model):
        return _plain_class(model)(model.config)
    return import_peft().get_peft_model(_fresh_model(model.get_base_model()), model.active_peft_config)


def load_whole_weights(model: PreTrainedModel, folder: Path) -> None:
    """Puts the weights of a folder into a model, sharded or not. All processes must call it.

    Raises:
        ValueError: If there is none for one of the model's.
    """
    # Averages that lie beside the weights have the same names.
    state = {name: weight for file in weight_names(folder) for name, weight in load_file(folder / file).items()}
    # A weight that has several names is saved under one.
    state |= {name: state[saved] for name, saved in model.all_tied_weights_keys.items() if saved in state}
    weights = model.state_dict(keep_vars=True)
    # Marian's positions are computed, and saved nowhere.
    if missing := weights.keys() - state.keys() - set(model._keys_to_ignore_on_save or ()):
        raise ValueError(f"{folder} must hold all weights of the model, got none for {', '.join(sorted(missing))}.")
    if not _is_partitioned(model):
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    # In the same order on each process.
    for name in filter(state.__contains__, weights):
        with _gathered(weights[name], written=True), torch.no_grad():
            weights[name].copy_(state[name])


def gather_partitions(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights of a model that DeepSpeed's third stage has shared out, on each process. All processes must call it."""
    state = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        with _gathered(weight):
            state[name] = weight.detach().clone()
    return state


def _gathered(weight: torch.Tensor, written: bool = False) -> contextlib.AbstractContextManager[None]:
    """Inside, a weight is whole; what was written into it is shared out afterwards as the first process wrote it."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if written else None)
