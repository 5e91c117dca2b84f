"""CTranslate2: a Metaphrase model as a folder that CTranslate2's `Translator` loads, with all that it needs beside it.

Importing this module also teaches CTranslate2's own `TransformersConverter` to read Metaphrase models.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.conversion.ctranslate2.spec import make_spec
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.loading import load_whole
from metaphrase.storage.weight_files import check_output, folder_in_one_step
from metaphrase.tokenization import TokenizerPair

try:
    from ctranslate2.converters.transformers import ModelLoader, register_loader
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
    from ctranslate2.specs.transformer_spec import TransformerConfig, TransformerSpec
except ImportError as error:
    raise ImportError("CTranslate2 is not installed: pip install metaphrase[ctranslate2]") from error

# What says where a folder comes from, and so that it may be replaced.
PROVENANCE_NAME = "export.json"
QUANTIZATIONS: tuple[str, ...] = tuple(ACCEPTED_MODEL_TYPES)


@register_loader(MetaphraseConfig.__name__)
class MetaphraseLoader(ModelLoader):
    """What CTranslate2's converter asks, by its names."""

    @property
    def architecture_name(self) -> str:
        return AutoModelForSeq2SeqLM.__name__

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformerSpec:
        # The converter loads one tokenizer; a separate one of the target lies below it.
        return self.read(model, TokenizerPair.from_pretrained(tokenizer.name_or_path))

    def get_model_spec(self, model: PreTrainedModel) -> TransformerSpec:
        return make_spec(model)

    def read(self, model: PreTrainedModel, tokenizers: TokenizerPair) -> TransformerSpec:
        """The specification of a model with the vocabularies of its tokenizers.

        Raises:
            ValueError: If CTranslate2 cannot express the model or its special ids.
        """
        spec = self.get_model_spec(model)
        config = model.config
        targets = vocabulary(tokenizers.target, config.decoder_vocab_size)
        is_one = tokenizers.is_joint and config.vocab_size == config.decoder_vocab_size
        spec.register_source_vocabulary(targets if is_one else vocabulary(tokenizers.source, config.vocab_size))
        spec.register_target_vocabulary(targets)
        _name_special_tokens(spec.config, model, tokenizers, targets)
        return spec


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """The tokens in the order of their ids, as many as the embedding has rows. Rows without a token get a name of their own."""
    known = tokenizer.get_vocab()
    tokens = {index: token for token, index in known.items()}
    names: list[str] = []
    for index in range(size):
        name = tokens.get(index)
        if name is None:
            name = f"<unused_{index}>"
            while name in known:
                name = f"<{name}>"
        names.append(name)
    return names


def _name_special_tokens(
    config: TransformerConfig, model: PreTrainedModel, tokenizers: TokenizerPair, targets: Sequence[str]
) -> None:
    """Tells CTranslate2 its special tokens, which it knows by name.

    Raises:
        ValueError: If there is not exactly one end of sequence.
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
    # A start that changes from call to call, as a language code does, is given with each call.
    is_given = start is None or model.config.decoder_start_from_labels
    config.decoder_start_token = None if is_given else targets[start]


def export_ctranslate2(
    source: str | os.PathLike, output: str | os.PathLike, *, quantization: str | None = None, overwrite: bool = False
) -> Path:
    """Writes a Metaphrase model as a folder of CTranslate2, with tokenizers and generation settings.

    The folder appears under its name only when it is complete.

    Args:
        source: Folder or Hub id of a Metaphrase model.
        output: The folder to write.
        quantization: Type of the weights, one of `QUANTIZATIONS`; `None` keeps that of the checkpoint.
        overwrite: Replace `output` if it exists and was written here.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If CTranslate2 cannot express the model, its weights are not whole, or an argument is out of its range.
        OSError: If there is no such model.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    source, output = os.fspath(source), Path(output)
    check_output(output, [Path(source)] if os.path.isdir(source) else [], overwrite, PROVENANCE_NAME, "exported")
    # Another kind of model is refused before its weights are read.
    config = MetaphraseConfig.from_pretrained(source)
    with torch.inference_mode():
        model = load_whole(source, config=config, dtype="auto", trust_remote_code=False)
        tokenizers = TokenizerPair.from_pretrained(source)
        spec = MetaphraseLoader().read(model, tokenizers)
        spec.validate()
        spec.optimize(quantization)
    with folder_in_one_step(output) as partial:
        spec.save(os.fspath(partial))
        tokenizers.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        name = Path(source).resolve().name if os.path.isdir(source) else source
        provenance = {"source": name, "from": MetaphraseConfig.model_type, "to": "ctranslate2"}
        if quantization is not None:
            provenance["quantization"] = quantization
        (partial / PROVENANCE_NAME).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    return output
