"""LoRA adapters: trainable low-rank matrices beside frozen weights, through peft.

Source: Hu et al. 2021, section 4, arXiv 2106.09685.
"""

import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, GENERATION_CONFIG_NAME

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.storage.loading import check_model_folder
from metaphrase.tokenization import TokenizerPair

if TYPE_CHECKING:
    from peft import PeftModel

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
) -> "PeftModel":
    """Freeze a model and add a trainable product of two thin matrices, alpha / rank * B A, to some of its weights.

    B starts at zero, so the output is unchanged at first. By default all linear layers but the output projection are adapted,
    which Dettmers et al. 2023 (section 4, arXiv 2305.14314) found necessary to match full fine-tuning.

    Args:
        model: Changed in place, and part of the result.
        rank: Inner dimension of the product.
        alpha: Weight of the product before division by the rank.
        dropout: Dropout probability of the product's input.
        target_modules: Ends of names of linear layers (`["q_proj", "v_proj"]`), or one regular expression for whole names.

    Returns:
        A peft model for a trainer, `generate()` and `merge_lora`. `save_pretrained` saves the adapter alone.

    Raises:
        ValueError: If a number is out of range, the model has adapters, or a target cannot be adapted and merged.
        ImportError: If peft is not installed.
    """
    peft = import_peft()
    if is_adapted(model):
        raise ValueError("`model` must be without adapters, got one that has some: merge them first.")
    check_targets(model, target_modules)
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_2_SEQ_LM,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
    )
    adapted = peft.get_peft_model(model, config)
    trained, total = adapted.get_nb_trainable_parameters()
    counts = f"{trained:,} parameters are trained beside the {total - trained:,} of the model"
    logger.info("LoRA of rank %d: %s.", rank, counts)
    return adapted


def check_targets(model: nn.Module, target_modules: str | Sequence[str]) -> None:
    """Refuse names without a layer, and layers whose merged weight would act differently from the adapter.

    Args:
        model: A model on any device, also the meta device.
        target_modules: See `add_lora`.

    Raises:
        ValueError: Naming the layer and the problem.
    """
    if target_modules == ALL_LINEAR:
        return
    if isinstance(target_modules, str):
        patterns = {target_modules: target_modules}
    else:
        patterns = {name: rf"(.*\.)?{re.escape(name)}" for name in target_modules}
    aliases = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for target, pattern in patterns.items():
        modules = {name: module for name, module in model.named_modules() if re.fullmatch(pattern, name)}
        if not modules:
            raise ValueError(
                f"`target_modules` must name linear layers of the model, got {target!r}, which names nothing."
            )
        for name, module in modules.items():
            # An embedding may scale its rows; its adapter does not.
            if not isinstance(module, nn.Linear):
                raise ValueError(f"`target_modules` must name linear layers, got {name!r}, a {type(module).__name__}.")
            if aliases[module.weight] > 1:
                raise ValueError(
                    f"`target_modules` must name weights that are not tied, got {name!r}: merging would change its twin."
                )


def load_lora(
    folder: str | os.PathLike, base_model: str | os.PathLike | PreTrainedModel | None = None, is_trainable: bool = False
) -> "PeftModel":
    """Load a saved adapter with its base model.

    Args:
        folder: Folder of the adapter, such as a checkpoint.
        base_model: The base model, its folder or its name on the Hub; by default the name saved with the adapter.
        is_trainable: True to continue training; otherwise all weights are frozen.

    Raises:
        ValueError: If there is no adapter in safetensors, or its base model cannot be loaded.
        ImportError: If peft is not installed.
    """
    peft, folder = import_peft(), Path(folder)
    for name in (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise ValueError(f"An adapter must be a folder with {name}, got {folder} without.")
    check_model_folder(folder)
    if not isinstance(base_model, PreTrainedModel):
        base_model = base_model or _base_model_name(folder)
        try:
            base_model = AutoModelForSeq2SeqLM.from_pretrained(
                base_model, dtype="auto", trust_remote_code=False, use_safetensors=True
            )
        except OSError as error:
            raise ValueError(
                f"`base_model` must be the model that the adapter in {folder} was trained on, got {os.fspath(base_model)!r}, "
                "which cannot be loaded. Give `base_model` if it lies elsewhere."
            ) from error
    if (folder / GENERATION_CONFIG_NAME).is_file():
        base_model.generation_config = GenerationConfig.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(base_model, folder, is_trainable=is_trainable)


def _base_model_name(folder: Path) -> str:
    name = import_peft().PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not name:
        raise ValueError(
            f"`base_model` must be given, because the adapter in {folder} does not say on what it was trained."
        )
    return name


def merge_lora(
    adapter: "str | os.PathLike | PeftModel", output: str | os.PathLike, base_model: str | os.PathLike | None = None
) -> PreTrainedModel:
    """Add an adapter to its base weights, and save the sum as a model that needs no peft.

    Args:
        adapter: Folder of the adapter, or a model with an adapter, whose base model then holds the merged weights.
        output: Folder for the model and the tokenizers of the adapter or, if it has none, of its base model.
        base_model: See `load_lora`.

    Returns:
        The merged model.

    Raises:
        ValueError: If the output holds an adapter, or as `load_lora`.
        ImportError: If peft is not installed.
    """
    output = Path(output)
    if (output / ADAPTER_CONFIG_NAME).exists():
        raise ValueError(f"`output` must not hold an adapter, which would be added once more on loading, got {output}.")
    folder = None if is_adapted(adapter) else Path(adapter)
    model = adapter if folder is None else load_lora(folder, base_model)
    is_tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        # peft compares the output projection with the encoder's embedding, which is wrong for two vocabularies.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged = model.merge_and_unload(safe_merge=True)
    merged.config.tie_word_embeddings = is_tied
    merged.requires_grad_(True)
    merged.save_pretrained(output)
    if folder is not None:
        _copy_tokenizers([folder, base_model or _base_model_name(folder)], output)
    return merged


def _copy_tokenizers(sources: Sequence[str | os.PathLike], output: Path) -> None:
    """Save the tokenizers of the first folder or Hub name that has them."""
    for source in sources:
        if not Path(source).is_dir() or (Path(source) / "tokenizer_config.json").is_file():
            return TokenizerPair.from_pretrained(source).save_pretrained(output)
    logger.warning("Neither the adapter nor its base model has a tokenizer: %s has none either.", output)
