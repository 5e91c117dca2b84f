"""Export to CTranslate2: a folder for its `Translator`, with tokenizers and generation settings.

Importing this module registers Metaphrase with CTranslate2's own `TransformersConverter`.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from ctranslate2.converters.transformers import ModelLoader, register_loader
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
from ctranslate2.specs.transformer_spec import TransformerConfig, TransformerSpec
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.conversion.ctranslate2.spec import make_spec
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import check_output, folder_in_one_step, write_provenance
from metaphrase.storage.loading import load_whole
from metaphrase.tokenization import TokenizerPair

PROVENANCE_NAME = "export.json"
QUANTIZATIONS: tuple[str, ...] = tuple(ACCEPTED_MODEL_TYPES)


@register_loader(MetaphraseConfig.__name__)
class MetaphraseLoader(ModelLoader):
    """Loader of Metaphrase models for CTranslate2's converter."""

    @property
    def architecture_name(self) -> str:
        return AutoModelForSeq2SeqLM.__name__

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformerSpec:
        # The converter loads only the source tokenizer.
        return self.read(model, TokenizerPair.from_pretrained(tokenizer.name_or_path))

    def get_model_spec(self, model: PreTrainedModel) -> TransformerSpec:
        return make_spec(model)

    def read(self, model: PreTrainedModel, tokenizers: TokenizerPair) -> TransformerSpec:
        """Return the specification of a model with its vocabularies.

        Raises:
            ValueError: If CTranslate2 cannot express the model or its special ids.
        """
        spec = self.get_model_spec(model)
        config = model.config
        targets = vocabulary(tokenizers.target, config.decoder_vocab_size)
        is_shared = tokenizers.is_joint and config.vocab_size == config.decoder_vocab_size
        spec.register_source_vocabulary(targets if is_shared else vocabulary(tokenizers.source, config.vocab_size))
        spec.register_target_vocabulary(targets)
        _set_special_tokens(spec.config, model, tokenizers, targets)
        return spec


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """Return `size` tokens in the order of their ids. An id without a token gets a unique name."""
    known = tokenizer.get_vocab()
    tokens = {index: token for token, index in known.items()}
    for index in set(range(size)) - tokens.keys():
        tokens[index] = f"<unused_{index}>"
        while tokens[index] in known:
            tokens[index] = f"<{tokens[index]}>"
    return [tokens[index] for index in range(size)]


def _set_special_tokens(
    config: TransformerConfig, model: PreTrainedModel, tokenizers: TokenizerPair, targets: Sequence[str]
) -> None:
    """Set the special tokens, which CTranslate2 knows by name.

    Raises:
        ValueError: If the model has no end of sequence, or several.
    """

    def special_id(name: str) -> int | list[int] | None:
        value = getattr(model.generation_config, name)
        return getattr(model.config, name) if value is None else value

    ends = special_id("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) != 1 or ends[0] is None:
        raise ValueError(f"CTranslate2 cannot express `eos_token_id` {ends}: it knows exactly one.")
    start = special_id("decoder_start_token_id")
    padding = tokenizers.target.pad_token
    config.eos_token = targets[ends[0]]
    config.unk_token = padding if tokenizers.target.unk_token is None else tokenizers.target.unk_token
    config.bos_token = padding if tokenizers.target.bos_token is None else tokenizers.target.bos_token
    # A start that varies, such as a language code, comes with each call.
    varies = start is None or model.config.decoder_start_from_labels
    config.decoder_start_token = None if varies else targets[start]


def export_ctranslate2(
    source: str | os.PathLike, output: str | os.PathLike, *, quantization: str | None = None, overwrite: bool = False
) -> Path:
    """Export a Metaphrase model to a CTranslate2 folder, which appears only when it is complete.

    Args:
        source: Folder or Hub id of a Metaphrase model.
        output: The folder to write.
        quantization: Type of the weights, one of `QUANTIZATIONS`. None keeps the checkpoint's type.
        overwrite: True to replace an `output` that this package wrote.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If CTranslate2 cannot express the model, weights are missing, or an argument is invalid.
        OSError: If the model does not exist.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    source, output = os.fspath(source), Path(output)
    check_output(output, [Path(source)] if os.path.isdir(source) else [], overwrite, PROVENANCE_NAME, "exported")
    # Refuses another kind of model before reading its weights.
    config = MetaphraseConfig.from_pretrained(source)
    with torch.inference_mode():
        model = load_whole(source, config=config, dtype="auto", trust_remote_code=False)
        tokenizers = TokenizerPair.from_pretrained(source)
        spec = MetaphraseLoader().read(model, tokenizers)
        spec.validate()
        spec.optimize(quantization)
    fields = {"from": MetaphraseConfig.model_type, "to": "ctranslate2"}
    fields |= {"quantization": quantization} if quantization else {}
    with folder_in_one_step(output) as partial:
        spec.save(os.fspath(partial))
        tokenizers.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        write_provenance(partial / PROVENANCE_NAME, source, **fields)
    return output
