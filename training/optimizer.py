"""Adafactor's own options, which the Trainer fixes: `optim: adafactor` with `optim_args: scale_parameter=true`.

With it an update is in proportion to the root mean square of the weights that it changes, as T5 was trained: its projections
begin a hundred times smaller than its embeddings, and one learning rate is too large for the ones or too small for the others.

Source: Shazeer and Stern 2018, sections 8 and 9, arXiv 1804.04235.

Gradient clipping that leaves gradients alone where it would multiply them by 1.

Parameter groups: which weights training leaves alone, and which it changes more slowly than others.

Patterns name parts of a model: `encoder`, `decoder.layers.0`, `encoder.layers.0-3` (the first four), `*.cross_attn`,
`lm_head`, `embeddings` (of tokens and positions, on both sides). Each names a module, with all that is in it, or a parameter;
wrappers around the network (`model.`) need not be named. What is one weight under several names, such as tied embeddings, is
meant by each of them.
"""

import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel, Trainer, TrainingArguments

_TRUTHS = {"true": True, "false": False}
# By the name of each: how its value is read, and how that is said.
_READERS = {
    "scale_parameter": (lambda word: _TRUTHS[word.lower()], "true or false"),
    "clip_threshold": (float, "a number"),
    "decay_rate": (float, "a number"),
}


def adafactor_options(optim_args: str | None) -> dict[str, bool | float]:
    """Reads `name=value,...`.

    Raises:
        ValueError: If a name is not known, or a value is not of its kind.
    """
    options = {}
    for part in (optim_args or "").replace(" ", "").split(","):
        if not part:
            continue
        name, _, value = part.partition("=")
        if name not in _READERS:
            raise ValueError(f"`optim_args` of adafactor must be some of {', '.join(_READERS)}, got {part!r}.")
        read, kind = _READERS[name]
        try:
            options[name] = read(value)
        except (KeyError, ValueError):
            raise ValueError(f"`{name}` in `optim_args` must be {kind}, got {value!r}.") from None
    return options


class AdafactorOptionsMixin:
    """For a trainer, before its parents: the optimizer's class and options, with those of Adafactor as they are given."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if getattr(args.optim, "value", args.optim) == "adafactor":
            options |= adafactor_options(args.optim_args)
        return optimizer_class, options


# Where each process holds all of the gradients.
_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU)


class GradientClippingMixin:
    """A `Trainer` that clips on a CPU as torch does, but for a pass over all gradients in the steps that need none.

    Source: clipping by the norm of all gradients is from Pascanu et al. 2013, section 3.2, arXiv 1211.5063.
    """

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        is_whole = self.accelerator.distributed_type in _WHOLE and all(
            type(parameter.grad) is torch.Tensor for parameter in parameters
        )
        if self.args.device.type != "cpu" or not is_whole:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        norm, limit = get_total_norm([parameter.grad for parameter in parameters]), self.args.max_grad_norm
        # torch's factor, which it takes no more than 1 of. If it is not a number, the gradients shall show it.
        if not limit / (norm + 1e-6) >= 1:
            clip_grads_with_norm_(parameters, limit, norm)
        return norm


logger = logging.getLogger(__name__)

# What may stand before the network's own names, and what compilers and shards put between them.
_WRAPPERS = ("base_model", "model", "module")
_INSERTED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EMBEDDINGS = ("shared", "*embed_tokens", "*embed_positions")
_LAYER = re.compile(r"(encoder|decoder)\.(?:layers|block)\.(\d+)\.")
_FINAL_NORMS = ("norm", "final_layer_norm", "layer_norm")


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Excludes parts of a model from training.

    A weight under several names is frozen if one of them is meant: with shared embeddings, `encoder` freezes the decoder's
    embedding and the output projection too, of which a warning tells.

    Args:
        model: Changed in place.
        patterns: Parts to freeze, in order; `!` before one takes it out again: `["encoder", "!embeddings"]`.

    Returns:
        How many parameters (numbers, not tensors) are frozen by this.

    Raises:
        ValueError: If a pattern names nothing, or nothing is left to train.
    """
    names = _all_names(model)
    frozen = _frozen(names, patterns)
    meant = [pattern for pattern in patterns if not pattern.startswith("!")]
    for parameter in frozen:
        _tell_of_ties(names[parameter], meant, "is frozen")
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in frozen)
    total = sum(parameter.numel() for parameter in names)
    logger.info("Frozen: %s of %s parameters (%s).", f"{count:,}", f"{total:,}", ", ".join(patterns))
    return count


def check_parts(model: nn.Module, frozen: Sequence[str], rates: Collection[str]) -> None:
    """Refuses what `freeze` and `parameter_groups` would, of a model that needs no weights.

    Args:
        model: On any device, the meta device too.
        frozen: As `freeze` takes them.
        rates: Patterns of `learning_rate_factors`.

    Raises:
        ValueError: If a pattern names nothing, or nothing is left to train.
    """
    names = _all_names(model)
    _frozen(names, frozen)
    for pattern in rates:
        _select(names, pattern, "learning_rate_factors")


def parameter_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    rates: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
    decay_names: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer, each with its learning rate and its weight decay.

    With `layer_decay`, the highest layer of each stack and all above it (final norm, output projection) learn at the full rate,
    each layer below at the rate of the one above times the decay, and what comes before the first layer (embeddings, position
    biases) as one layer more. A weight in several of these places learns at the lowest of their rates.

    Source: Howard and Ruder 2018, section 3.2, arXiv 1801.06146 (rates that fall from layer to layer); Clark et al. 2020,
    appendix B, arXiv 2003.10555 (with a constant factor, for fine-tuning a Transformer).

    Args:
        model: What requires no gradient is left out.
        learning_rate: Of all that nothing else is said about.
        weight_decay: Of the parameters in `decay_names`.
        rates: Factors of the learning rate by pattern; of several that mean the same, the last holds.
        layer_decay: Factor from layer to layer, in (0, 1].
        decay_names: Parameters that decay; by default those that transformers' `Trainer` chooses, which are neither biases nor in
            norms.

    Returns:
        Dictionaries with `params`, `lr` and `weight_decay`; those of the full rate come first, so that a log of the first group's
        rate shows that.

    Raises:
        ValueError: If a pattern names nothing, a factor is out of range, or nothing is to be trained.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"`layer_decay` must be above 0 and at most 1, got {layer_decay}.")
    names = _all_names(model)
    factors = _layer_factors(names, layer_decay) if layer_decay < 1 else dict.fromkeys(names, 1.0)
    for parameter, factor in _rate_factors(names, rates or {}).items():
        factors[parameter] *= factor
    if decay_names is None:
        decay_names = Trainer.get_decay_parameter_names(None, model)
    decay_names = set(decay_names)
    decaying = {parameter for name, parameter in model.named_parameters() if name in decay_names}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter, factor in factors.items():
        if parameter.requires_grad:
            groups.setdefault((factor, parameter in decaying), []).append(parameter)
    if not groups:
        raise ValueError("`model` must have something to train, got all of it frozen.")
    result = []
    for factor, decays in sorted(groups, key=lambda group: (group[0] != 1, -group[0], not group[1])):
        members = groups[factor, decays]
        group = {"lr": learning_rate * factor, "weight_decay": weight_decay if decays else 0.0}
        result.append({"params": members, **group})
        count = f"{sum(parameter.numel() for parameter in members):,}"
        logger.info("Learning rate %g, weight decay %g: %s parameters.", group["lr"], group["weight_decay"], count)
    return result


class ParameterGroupsMixin:
    """For a trainer, before its parents: an optimizer with `parameter_groups` when one of the two fields is set.

    Which parameters decay is asked of `get_decay_parameter_names`, and the optimizer of the training arguments, as ever.
    """

    learning_rate_factors: Mapping[str, float] | None = None
    layer_decay: float = 1.0

    def create_optimizer(self, model=None):
        if self.optimizer is not None or not (self.learning_rate_factors or self.layer_decay != 1):
            return super().create_optimizer(model)
        trained = self.model if model is None else model
        given = self.optimizer_cls_and_kwargs
        optimizer_class, options = given or self.get_optimizer_cls_and_kwargs(self.args, trained)
        is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        if not is_class or any(name in options for name in ("params", "model", "optimizer_dict")):
            name = getattr(self.args.optim, "value", self.args.optim)
            raise ValueError(f"`optim` must be an optimizer that takes groups, got {name}, which makes its own.")
        groups = parameter_groups(
            trained,
            self.args.learning_rate,
            self.args.weight_decay,
            self.learning_rate_factors,
            self.layer_decay,
            self.get_decay_parameter_names(trained),
        )
        # The parent takes `params` among an optimizer's options for the groups.
        self.optimizer_cls_and_kwargs = (optimizer_class, {**options, "params": groups})
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given


def _all_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter's names without wrappers, in the order of the parameters."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(_without_wrappers(name))
    return names


def _without_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _INSERTED]
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def _globs(pattern: str) -> list[str]:
    """The pattern with each range of numbers written out: `encoder.layers.0-1` is layers 0 and 1."""
    choices = []
    for part in _without_wrappers(pattern).split("."):
        bounds = re.fullmatch(r"(\d+)-(\d+)", part)
        choices.append(map(str, range(int(bounds[1]), int(bounds[2]) + 1)) if bounds else [part])
    return [".".join(parts) for parts in itertools.product(*choices)]


def _means(glob: str, name: str) -> bool:
    """Whether a pattern means a parameter or one of the modules around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), glob) for end in range(1, len(parts) + 1))


def _select(names: Mapping[nn.Parameter, list[str]], pattern: str, field: str) -> set[nn.Parameter]:
    """The parameters that a pattern means.

    Raises:
        ValueError: If there is none, or one of a range is missing.
    """
    selected = set()
    for glob in _globs(pattern):
        alternatives = _EMBEDDINGS if glob == "embeddings" else (glob,)
        found = {
            parameter
            for parameter, aliases in names.items()
            if any(_means(alternative, alias) for alternative in alternatives for alias in aliases)
        }
        if not found:
            parts = sorted({alias.split(".")[0] for aliases in names.values() for alias in aliases})
            raise ValueError(
                f"`{field}` must name parts of the model, got {pattern!r}, and there is no {glob!r}. "
                f"At the top there are {', '.join(parts)}."
            )
        selected |= found
    return selected


def _frozen(names: Mapping[nn.Parameter, list[str]], patterns: Sequence[str]) -> set[nn.Parameter]:
    """What `freeze` excludes from training.

    Raises:
        ValueError: As `freeze`.
    """
    frozen = set()
    for pattern in patterns:
        found = _select(names, pattern.removeprefix("!"), "freeze")
        frozen = frozen - found if pattern.startswith("!") else frozen | found
    if not any(parameter.requires_grad and parameter not in frozen for parameter in names):
        raise ValueError(f"`freeze` must leave something to train, got {', '.join(patterns)}.")
    return frozen


def _tell_of_ties(aliases: Sequence[str], patterns: Sequence[str], what: str) -> None:
    """Warns of a weight that has names which no pattern means."""
    globs = [glob for pattern in patterns for glob in _globs(pattern)]
    globs += list(_EMBEDDINGS) if "embeddings" in globs else []
    others = [alias for alias in aliases if not any(_means(glob, alias) for glob in globs)]
    if others and len(others) < len(aliases):
        meant = next(alias for alias in aliases if alias not in others)
        logger.warning("%s %s, and with it, being the same weight: %s.", meant, what, ", ".join(others))


def _rate_factors(names: Mapping[nn.Parameter, list[str]], rates: Mapping[str, float]) -> dict[nn.Parameter, float]:
    factors, pattern_of = {}, {}
    for pattern, factor in rates.items():
        if not factor > 0:
            raise ValueError(
                f"`learning_rate_factors` must be above 0, got {factor} for {pattern!r}: freeze it instead."
            )
        for parameter in _select(names, pattern, "learning_rate_factors"):
            factors[parameter], pattern_of[parameter] = factor, pattern
    for parameter, factor in factors.items():
        if parameter.requires_grad and factor != 1:
            _tell_of_ties(names[parameter], [pattern_of[parameter]], f"learns at {factor:g} times the rate")
    return factors


def _layer_factors(names: Mapping[nn.Parameter, list[str]], layer_decay: float) -> dict[nn.Parameter, float]:
    layers: dict[str, int] = {}
    for stack, index in itertools.chain.from_iterable(map(_LAYER.findall, itertools.chain(*names.values()))):
        layers[stack] = max(layers.get(stack, 0), int(index) + 1)
    if not layers:
        raise ValueError(
            "`layer_decay` must come with a model with `encoder.layers` or `decoder.layers`, got one without."
        )
    return {
        parameter: layer_decay ** max(_layers_above(alias, layers) for alias in aliases)
        for parameter, aliases in names.items()
    }


def _layers_above(name: str, layers: Mapping[str, int]) -> int:
    """Steps of the learning rate from the top of the stack down to a parameter."""
    stack, *rest = name.split(".")
    if stack not in layers or rest[0] in _FINAL_NORMS:
        return 0
    place = _LAYER.match(name)
    return layers[stack] - 1 - int(place[2]) if place else layers[stack]
