"""Adaptation: an encoder-decoder from the layers of a decoder-only model, to be trained on.

Source: Zhang et al. 2025, section 3, arXiv 2504.06225; merged attention from Zhang et al. 2025, section 2.2, arXiv 2512.14856.
"""

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import processors
from transformers import CONFIG_MAPPING, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME

from metaphrase.conversion import checkpoints
from metaphrase.conversion.families.family import are_equal, rename
from metaphrase.conversion.families.two_stacks import T5Gemma, T5Gemma2
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import FULL, SLIDING, STACKS
from metaphrase.storage.folders import ADAPTATION_NAME, read_json, write_provenance
from metaphrase.storage.loading import check_model_folder
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_trainer import fast_tokenizer

CrossAttention = Literal["copied", "new", "merged"]
_GEMMA = {"norm_position": "both", "norm_plus_one": True, "scale_embedding": True}
# The decoder-only models, and what their configurations do not say.
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Queries, keys and values have a bias. The output gets a bias of zeros.
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"qk_norm": True},
}
# Our names of modules, and theirs.
_NAMES = {
    r"^model\.\w+coder": "model",
    "cross_attn": "self_attn",
    "self_attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_NAMES_AROUND = _NAMES | {
    "self_attn_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class _Base(NamedTuple):
    folder: Path
    config: PreTrainedConfig
    weights: WeightFiles
    layers: Sequence[int]


def adapt(
    base: str | os.PathLike,
    output: str | os.PathLike,
    *,
    encoder: str | os.PathLike | None = None,
    encoder_layers: Sequence[int] | None = None,
    decoder_layers: Sequence[int] | None = None,
    cross_attention: CrossAttention | None = None,
    dropout: float = 0.1,
    overwrite: bool = False,
    max_shard_size: int | str = checkpoints.DEFAULT_SHARD_SIZE,
) -> Path:
    """Make an encoder-decoder of the layers of decoder-only models. It needs training: its cross-attention knows nothing.

    Embeddings, layers and final norm go into both stacks. In the encoder, attention is no longer causal. Vocabulary and special
    ids stay. Texts end with the end of sequence, and have no beginning, since the decoder starts with it.

    Args:
        base: Folder or Hub id of the model for the decoder, and for the encoder by default.
        encoder: Folder or Hub id of another model for the encoder. Source and target then have embeddings of their own.
        encoder_layers: Numbers of the layers that the encoder takes, from 0. None takes all.
        decoder_layers: The same for the decoder.
        cross_attention: `copied` from the self-attention of the same layer; `new`, with random keys and values and an output of
            zero, so that the decoder computes the same as its base; or `merged` with the self-attention. None is `copied` if
            both stacks have the same width, and else `new`.
        dropout: Probability for embeddings and sublayers, which most decoder-only models lack.
        max_shard_size: Limit of a weight file, in bytes or such as 500MB or 5GB.

    Raises:
        MetaphraseError: If the models cannot be adapted, or do not fit each other.
    """
    kinds = get_args(CrossAttention)
    if cross_attention not in (None, *kinds):
        raise MetaphraseError(f"`cross_attention` must be one of {', '.join(kinds)}, got {cross_attention!r}.")
    folders = {"decoder": checkpoints.find_folder(base), "encoder": checkpoints.find_folder(encoder or base)}
    layers = {"decoder": decoder_layers, "encoder": encoder_layers}
    with (
        checkpoints.new_folder(Path(output), [*folders.values()], overwrite, ADAPTATION_NAME, "adapted") as partial,
        contextlib.ExitStack() as files,
    ):
        bases = {stack: _read_base(folders[stack], layers[stack], f"{stack}_layers", files) for stack in STACKS}
        source, target = (_adapt_tokenizer(bases[stack].folder) for stack in STACKS)
        tokenizers = TokenizerPair(source, source if target.get_vocab() == source.get_vocab() else target)
        widths = {base.config.hidden_size for base in bases.values()}
        cross_attention = cross_attention or ("copied" if len(widths) == 1 else "new")
        config = _make_config(bases, tokenizers, dropout=dropout, merged_attention=cross_attention == "merged")
        model = checkpoints.skeleton(MetaphraseForConditionalGeneration, config)
        planned = _plan(model, bases, is_new=cross_attention == "new")
        checkpoints.write_ours(partial, model, planned, GenerationConfig.from_model_config(config), max_shard_size)
        tokenizers.save_pretrained(partial)
        checkpoints.copy_files(folders["decoder"], partial, checkpoints.LICENCES)
        provenance = {"from": bases["decoder"].config.model_type, "to": checkpoints.OURS}
        write_provenance(partial / ADAPTATION_NAME, base, **provenance)
    return Path(output)


def _read_base(folder: Path, layers: Sequence[int] | None, field: str, files: contextlib.ExitStack) -> _Base:
    check_model_folder(folder)
    model_type = read_json(folder / CONFIG_NAME).get("model_type")
    if model_type not in BASES:
        raise MetaphraseError(f"`model_type` must be one of {', '.join(BASES)}, got {model_type!r} for {folder}.")
    config = CONFIG_MAPPING[model_type].from_pretrained(folder)
    count = config.num_hidden_layers
    layers = range(count) if layers is None else layers
    if (unknown := sorted({*layers} - {*range(count)})[:3]) or not layers:
        raise MetaphraseError(f"`{field}` must be numbers of layers from 0 to {count - 1}, got {unknown}.")
    return _Base(folder, config, WeightFiles(folder, files), layers)


def _adapt_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer that ends a text with the end of sequence, and puts nothing in front."""
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    end, backend = theirs.eos_token, theirs.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, theirs.eos_token_id)]
    )
    tokens = {name: getattr(theirs, name) for name in ("bos_token", "eos_token", "unk_token")}
    # Padding is masked, so that any token serves.
    tokens["pad_token"] = theirs.pad_token or theirs.unk_token or end
    return fast_tokenizer(backend, **tokens, model_max_length=theirs.model_max_length)


def _make_config(bases: dict[str, _Base], tokenizers: TokenizerPair, **options: Any) -> MetaphraseConfig:
    fields: dict[str, Any] = {}
    for stack, prefix in (("decoder", "decoder_"), ("encoder", "")):
        theirs = bases[stack].config
        # The T5Gemma whose rotation and windows these layers have.
        family = T5Gemma2() if FULL in theirs.rope_parameters else T5Gemma("t5gemma")
        scale = getattr(theirs, "query_pre_attn_scalar", None)
        shared = {
            "position_embedding_type": "rotary",
            "activation_function": getattr(theirs, "hidden_activation", None) or theirs.hidden_act,
            "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            "norm_eps": theirs.rms_norm_eps,
            "scale_embedding": False,
            "attention_scale": None if scale is None else scale**-0.5,
            "attn_logit_softcapping": getattr(theirs, "attn_logit_softcapping", None),
            "attention_bias": getattr(theirs, "attention_bias", False),
            "mlp_bias": getattr(theirs, "mlp_bias", False),
            **family.read_rotation(theirs.rope_parameters),
            **BASES[theirs.model_type],
        }
        for name, value in shared.items():
            if fields.setdefault(name, value) != value:
                raise MetaphraseError(f"`{name}` must be the same in both models, got {fields[name]} and {value}.")
        types = getattr(theirs, "layer_types", None) or [FULL] * theirs.num_hidden_layers
        types = [types[index] for index in bases[stack].layers]
        windows = family.windows(theirs.sliding_window) if SLIDING in types else (None, None)
        for name in ("hidden_size", "vocab_size", "num_key_value_heads"):
            fields[prefix + name] = getattr(theirs, name)
        fields |= {
            f"{stack}_layers": len(types),
            f"{stack}_attention_heads": theirs.num_attention_heads,
            f"{stack}_ffn_dim": theirs.intermediate_size,
            f"{stack}_layer_types": types,
            f"{stack}_window": windows[STACKS.index(stack)],
        }
    encoder, decoder = (bases[stack] for stack in STACKS)
    weights = decoder.weights
    ids = {name: value for name, value in tokenizers.config_fields().items() if name.endswith("_id")}
    return MetaphraseConfig(
        **fields | ids | options,
        dtype=decoder.config.dtype,
        initializer_range=decoder.config.initializer_range,
        max_position_embeddings=min(stack.config.max_position_embeddings for stack in bases.values()),
        final_logit_softcapping=getattr(decoder.config, "final_logit_softcapping", None),
        share_embeddings=encoder.folder == decoder.folder,
        tie_word_embeddings=_HEAD not in weights.kinds or are_equal(weights.read(_HEAD), weights.read(_EMBEDDING)),
    )


def _plan(model: MetaphraseForConditionalGeneration, bases: dict[str, _Base], is_new: bool) -> dict[str, PlannedTensor]:
    planned = {}
    for number, name in enumerate(checkpoints.stored_names(model)):
        base = bases["encoder" if name.startswith("model.encoder.") else "decoder"]
        shape, kinds, layers = model.get_parameter(name).shape, base.weights.kinds, base.layers
        is_around = BASES[base.config.model_type].get("norm_position") == "both"
        theirs = rename(name, _NAMES_AROUND if is_around else _NAMES)
        theirs = re.sub(r"(?<=layers\.)\d+", lambda number, layers=layers: str(layers[int(number[0])]), theirs)
        of_new_attention = name.partition(".cross_attn.")[2] if is_new else ""
        like = base.weights.read(_NORM)
        is_bias_of_output = name.endswith("o_proj.bias") and base.config.model_type == "qwen2"
        if of_new_attention.startswith("o_proj") or is_bias_of_output:
            make = functools.partial(like.new_zeros, shape)
        elif of_new_attention in ("k_proj.weight", "v_proj.weight"):
            generator, std = torch.Generator().manual_seed(number), model.config.initializer_range
            make = functools.partial(torch.normal, 0.0, std, shape, generator=generator, dtype=like.dtype)
        else:
            checkpoints.check_names([theirs], kinds)
            checkpoints.check_shape(theirs, kinds[theirs].shape, tuple(shape))
            make = functools.partial(base.weights.read, theirs)
        planned[name] = PlannedTensor(shape.numel() * like.itemsize, make)
    return planned
