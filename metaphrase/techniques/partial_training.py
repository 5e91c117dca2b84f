"""Training of a part of the weights: frozen parts, and LoRA adapters."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from metaphrase.errors import MetaphraseError

logger = logging.getLogger(__name__)

# Patterns name parts of a model: `encoder`, `decoder.layers.0`, `encoder.layers.0-3` (the first four), `*.cross_attn`, `lm_head`,
# `embeddings` (of tokens and positions, on both sides). A pattern names a module with all its parameters, or one parameter. The
# name of a wrapper (`model.`) may be left out. A weight with several names, such as a tied embedding, matches by any of them.

_EMBEDDINGS = ("shared", "*embed_tokens", "*embed_positions")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parts of a model from training, see `check_parts`.

    With shared embeddings, `encoder` also freezes the decoder's embedding and the output projection, and a warning says so.
    """
    frozen = check_parts(model, patterns)
    for parameter, names in frozen.items():
        parameter.requires_grad_(False)
        named, unnamed = ([name for name, is_named in names.items() if is_named is kind] for kind in (True, False))
        if unnamed:
            logger.warning("%s is frozen, and with it, being the same weight: %s.", named[0], ", ".join(unnamed))
    count, total = (f"{sum(map(nn.Parameter.numel, part)):,}" for part in (frozen, model.parameters()))
    logger.info("Frozen: %s of %s parameters (%s).", count, total, ", ".join(patterns))


class FrozenStart(TrainerCallback):
    """Callback that leaves parts of a model, see `check_parts`, as they are for the first updates.

    Their gradients are removed, so that neither weights nor moments of the optimizer change.
    """

    def __init__(self, patterns: Sequence[str], steps: int):
        self.patterns, self.steps = patterns, steps

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.frozen = check_parts(model, self.patterns)
        logger.info("Frozen for %d updates: %s.", self.steps, ", ".join(self.patterns))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < self.steps:
            for parameter in self.frozen:
                parameter.grad = None


def check_parts(model: nn.Module, patterns: Sequence[str]) -> dict[nn.Parameter, dict[str, bool]]:
    """Return the parameters that patterns freeze, each with its names without wrapper, True where a pattern matches.

    A weight with several names is frozen if one of them matches.

    Args:
        patterns: Parts to freeze, in order; `!` before one takes it out again: `["encoder", "!embeddings"]`.

    Raises:
        MetaphraseError: If a pattern matches nothing, or nothing is left to train.
    """
    names: dict[nn.Parameter, dict[str, bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, {})[name.removeprefix("model.")] = False
    frozen = {}
    for pattern in patterns:
        part = pattern.removeprefix("!").removeprefix("model.")
        # `encoder.layers.0-1` stands for the layers 0 and 1.
        bounds = re.search(r"\b(\d+)-(\d+)\b", part)
        numbers = range(int(bounds[1]), int(bounds[2]) + 1) if bounds else ()
        for glob in [part.replace(bounds[0], str(number)) for number in numbers] or [part]:
            matching = {weight for weight, aliases in names.items() if any(_matches(glob, alias) for alias in aliases)}
            if not matching:
                tops = sorted({alias.split(".")[0] for aliases in names.values() for alias in aliases})
                raise MetaphraseError(
                    f"`freeze` must name parts of the model, got {pattern.removeprefix('!')!r}, and there is no {glob!r}. "
                    f"At the top there are {', '.join(tops)}."
                )
            for weight in matching:
                if pattern.startswith("!"):
                    frozen.pop(weight, None)
                else:
                    frozen[weight] = names[weight]
                    names[weight].update({alias: True for alias in names[weight] if _matches(glob, alias)})
    if not any(parameter.requires_grad and parameter not in frozen for parameter in names):
        raise MetaphraseError(f"`freeze` must leave something to train, got {', '.join(patterns)}.")
    return frozen


def _matches(glob: str, name: str) -> bool:
    """True if a glob matches a parameter or one of the modules around it."""
    globs, parts = _EMBEDDINGS if glob == "embeddings" else (glob,), name.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(module, glob) for module in modules for glob in globs)


# LoRA: trainable low-rank matrices beside frozen weights (Hu et al. 2021, section 4, arXiv 2106.09685)


def add_lora(
    model: PreTrainedModel,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> PreTrainedModel:
    """Freeze a model and add a trainable product of two thin matrices, alpha / rank * B A, to some of its weights.

    B starts at zero, so the output is unchanged at first. By default all linear layers but the output projection are adapted,
    which Dettmers et al. 2023 (section 4, arXiv 2305.14314) found necessary to match full fine-tuning.

    Args:
        model: Changed in place, and part of the result, which is a peft model.
        alpha: Weight of the product before division by the rank.
        dropout: Dropout probability of the input.
        target_modules: Ends of names of linear layers, such as `["q_proj", "v_proj"]`; None for all but the output projection.

    Raises:
        MetaphraseError: If a name has no layer, or one whose merged weight would act differently from the adapter.
    """
    import peft

    # An embedding may scale its rows, which its adapter does not. Merging would change the twin of a tied weight.
    aliases = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for target in target_modules or ():
        modules = [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not modules or not all(isinstance(module, nn.Linear) and aliases[module.weight] == 1 for module in modules):
            raise MetaphraseError(f"`lora_target_modules` must name linear layers that are not tied, got {target!r}.")
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_2_SEQ_LM,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules or "all-linear",
    )
    adapted = peft.get_peft_model(model, config)
    trained, total = adapted.get_nb_trainable_parameters()
    text = "LoRA of rank %d: %s parameters are trained beside the %s of the model."
    logger.info(text, rank, f"{trained:,}", f"{total - trained:,}")
    return adapted
