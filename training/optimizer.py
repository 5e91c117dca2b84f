"""Optimizer of a trainer: frozen weights, and Adafactor's own options.

Patterns name parts of a model: `encoder`, `decoder.layers.0`, `encoder.layers.0-3` (the first four), `*.cross_attn`, `lm_head`,
`embeddings` (of tokens and positions, on both sides). A pattern names a module with all its parameters, or one parameter. The
names of wrappers (`model.`) may be left out. A weight with several names, such as a tied embedding, matches by any of them.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

logger = logging.getLogger(__name__)

_READ_THE_MODEL = ("lomo", "galore", "apollo")
# Prefixes of a wrapped model, and parts that compilers and sharding insert into names.
_WRAPPERS = ("base_model", "model", "module")
_INSERTED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EMBEDDINGS = ("shared", "*embed_tokens", "*embed_positions")


def adafactor_options(optim_args: str | None) -> dict[str, bool | float]:
    """Parse `optim_args` of Adafactor, such as `scale_parameter=true,clip_threshold=0.5`.

    With `scale_parameter`, an update is in proportion to the root mean square of the weights, as in T5's training.

    Source: Shazeer and Stern 2018, sections 8 and 9, arXiv 1804.04235.

    Raises:
        ValueError: If a name is unknown, or a value is of the wrong kind.
    """
    parse = {
        "scale_parameter": {"true": True, "false": False}.__getitem__,
        "clip_threshold": float,
        "decay_rate": float,
    }
    options = {}
    for part in filter(None, (optim_args or "").replace(" ", "").lower().split(",")):
        name, _, value = part.partition("=")
        try:
            options[name] = parse[name](value)
        except (KeyError, ValueError):
            known = "scale_parameter=true, clip_threshold=0.5 and decay_rate=-0.8"
            raise ValueError(f"`optim_args` of adafactor must be options such as {known}, got {part!r}.") from None
    return options


def optimizer_class_and_options(arguments: TrainingArguments, model: PreTrainedModel | None = None) -> tuple:
    """Return what `Trainer.get_optimizer_cls_and_kwargs` returns, with Adafactor's options, which it ignores."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    if arguments.optim == OptimizerNames.ADAFACTOR:
        options |= adafactor_options(arguments.optim_args)
    return optimizer_class, options


def check_optimizer(arguments: TrainingArguments) -> None:
    """Refuse options of optimizer and schedule before any data is read, by making both for a single weight.

    Raises:
        ValueError: Naming the field.
    """
    if arguments.optim_target_modules or any(name in arguments.optim for name in _READ_THE_MODEL):
        return
    weight = nn.Parameter(torch.zeros(1))
    try:
        optimizer_class, options = optimizer_class_and_options(arguments)
        optimizer = optimizer_class([weight], **options)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`optim_args` must be options of `optim` {arguments.optim.value}, such as name=value,other=value, got "
            f"{arguments.optim_args!r}: {error}"
        ) from error
    try:
        kwargs = arguments.lr_scheduler_kwargs
        get_scheduler(arguments.lr_scheduler_type, optimizer, 0, 10, scheduler_specific_kwargs=kwargs)
    except (ValueError, TypeError) as error:
        name = arguments.lr_scheduler_type.value
        raise ValueError(
            f"`lr_scheduler_kwargs` must be options of `lr_scheduler_type` {name}, got {kwargs}: {error}"
        ) from error


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude parts of a model from training.

    A weight with several names is frozen if one of them matches. With shared embeddings, `encoder` also freezes the decoder's
    embedding and the output projection, and a warning says so.

    Args:
        model: Changed in place.
        patterns: Parts to freeze, in order; `!` before one takes it out again: `["encoder", "!embeddings"]`.

    Returns:
        The number of frozen parameters (numbers, not tensors).

    Raises:
        ValueError: If a pattern matches nothing, or nothing is left to train.
    """
    names, frozen = _names_of_parameters(model), check_parts(model, patterns)
    globs = [glob for pattern in patterns if not pattern.startswith("!") for glob in _expand_ranges(pattern)]
    for parameter in frozen:
        parameter.requires_grad_(False)
        unnamed = [name for name in names[parameter] if not any(_matches(glob, name) for glob in globs)]
        if unnamed and len(unnamed) < len(names[parameter]):
            named = next(name for name in names[parameter] if name not in unnamed)
            logger.warning("%s is frozen, and with it, being the same weight: %s.", named, ", ".join(unnamed))
    count = sum(parameter.numel() for parameter in frozen)
    total = sum(parameter.numel() for parameter in names)
    logger.info("Frozen: %s of %s parameters (%s).", f"{count:,}", f"{total:,}", ", ".join(patterns))
    return count


def check_parts(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters that `freeze` would freeze in a model, which may be on the meta device.

    Raises:
        ValueError: If a pattern matches nothing, or nothing is left to train.
    """
    names, frozen = _names_of_parameters(model), set()
    for pattern in patterns:
        for glob in _expand_ranges(pattern.removeprefix("!")):
            matching = {weight for weight, aliases in names.items() if any(_matches(glob, alias) for alias in aliases)}
            if not matching:
                parts = sorted({alias.split(".")[0] for aliases in names.values() for alias in aliases})
                raise ValueError(
                    f"`freeze` must name parts of the model, got {pattern.removeprefix('!')!r}, and there is no {glob!r}. "
                    f"At the top there are {', '.join(parts)}."
                )
            frozen = frozen - matching if pattern.startswith("!") else frozen | matching
    if not any(parameter.requires_grad and parameter not in frozen for parameter in names):
        raise ValueError(f"`freeze` must leave something to train, got {', '.join(patterns)}.")
    return frozen


def _names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter without wrappers, in the order of the parameters."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(_without_wrappers(name))
    return names


def _without_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _INSERTED]
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def _expand_ranges(pattern: str) -> list[str]:
    """Return a glob for each number of a range: `encoder.layers.0-1` gives layers 0 and 1."""
    choices = []
    for part in _without_wrappers(pattern).split("."):
        bounds = re.fullmatch(r"(\d+)-(\d+)", part)
        choices.append(map(str, range(int(bounds[1]), int(bounds[2]) + 1)) if bounds else [part])
    return [".".join(parts) for parts in itertools.product(*choices)]


def _matches(glob: str, name: str) -> bool:
    """True if a glob matches a parameter or one of the modules around it."""
    globs, parts = _EMBEDDINGS if glob == "embeddings" else (glob,), name.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(module, glob) for module in modules for glob in globs)
