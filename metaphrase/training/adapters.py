"""LoRA adapters: trainable low-rank matrices beside frozen weights, through peft.

Source: Hu et al. 2021, section 4, arXiv 2106.09685.
"""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"


def import_peft() -> ModuleType:
    """Return the package peft.

    Raises:
        ImportError: If it is not installed, saying how to install it.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft, which is not installed: pip install metaphrase[lora]") from error
    return peft


def is_adapted(model: nn.Module) -> bool:
    """Return True if a model is a peft model with adapters. peft need not be installed."""
    return any(base.__module__.startswith("peft.") and base.__name__ == "PeftModel" for base in type(model).__mro__)


def add_lora(
    model: PreTrainedModel,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = ALL_LINEAR,
) -> PreTrainedModel:
    """Freeze a model and add a trainable product of two thin matrices, alpha / rank * B A, to some of its weights.

    B starts at zero, so the output is unchanged at first. By default all linear layers but the output projection are adapted,
    which Dettmers et al. 2023 (section 4, arXiv 2305.14314) found necessary to match full fine-tuning.

    Args:
        model: Changed in place, and part of the result, which is a peft model.
        rank: Inner dimension of the product.
        alpha: Weight of the product before division by the rank.
        dropout: Dropout probability of the product's input.
        target_modules: Ends of names of linear layers, such as `["q_proj", "v_proj"]`.
    """
    peft = import_peft()
    if target_modules != ALL_LINEAR:
        _check_targets(model, target_modules)
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_2_SEQ_LM,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
    )
    adapted = peft.get_peft_model(model, config)
    trained, total = adapted.get_nb_trainable_parameters()
    counts = f"{trained:,} parameters are trained beside the {total - trained:,} of the model"
    logger.info("LoRA of rank %d: %s.", rank, counts)
    return adapted


def _check_targets(model: nn.Module, target_modules: Sequence[str]) -> None:
    """Refuse names without a layer, and layers whose merged weight would act differently from the adapter.

    An embedding may scale its rows, which its adapter does not. Merging would change the twin of a tied weight.
    """
    aliases = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for target in target_modules:
        modules = [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not modules or not all(isinstance(module, nn.Linear) and aliases[module.weight] == 1 for module in modules):
            raise ValueError(f"`lora_target_modules` must name linear layers without tied weights, got {target!r}.")


def merge_lora(model: PreTrainedModel, output: str | os.PathLike) -> PreTrainedModel:
    """Add an adapter to its base weights in place, save the sum as a model that needs no peft, and return it."""
    is_tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        # peft compares the output projection with the encoder's embedding, which is wrong for two vocabularies.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged = model.merge_and_unload(safe_merge=True)
    merged.config.tie_word_embeddings = is_tied
    merged.requires_grad_(True)
    merged.save_pretrained(output)
    return merged
