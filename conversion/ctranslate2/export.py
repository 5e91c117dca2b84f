"""Export to CTranslate2: a folder for its `Translator`, with tokenizers and generation settings."""

import functools
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from ctranslate2.converters import utils
from ctranslate2.specs import attention_spec, common_spec, model_spec
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import check_output, folder_in_one_step, write_provenance
from metaphrase.storage.loading import check_model_folder, load_whole
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME, find_vocabulary_map

PROVENANCE_NAME = "export.json"
QUANTIZATIONS: tuple[str, ...] = tuple(ACCEPTED_MODEL_TYPES)
# Sinusoids have no limit, but a table has. A longer text raises an error.
SINUSOIDAL_POSITIONS = 4096
_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    **dict.fromkeys(("gelu", "gelu_python"), common_spec.Activation.GELU),
    **dict.fromkeys(_TANH_GELUS, common_spec.Activation.GELUTanh),
    "quick_gelu": common_spec.Activation.GELUSigmoid,
    **dict.fromkeys(("silu", "swish"), common_spec.Activation.SWISH),
    "tanh": common_spec.Activation.Tanh,
    "sigmoid": common_spec.Activation.Sigmoid,
}
# The frequencies of these depend on the length.
_CHANGING_ROTATIONS = ("dynamic", "longrope")
_BIASED = ("relative", "none")


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
    sources = [Path(source)] if os.path.isdir(source) else []
    check = functools.partial(check_output, output, sources, overwrite, PROVENANCE_NAME, "exported")
    check()
    # Refuses another kind of model before reading its weights.
    check_model_folder(source)
    config = MetaphraseConfig.from_pretrained(source)
    with torch.inference_mode():
        model = load_whole(source, config=config, dtype="auto", trust_remote_code=False)
    tokenizers = TokenizerPair.from_pretrained(source)
    fields = {"from": MetaphraseConfig.model_type, "to": "ctranslate2"}
    fields |= {"quantization": quantization} if quantization else {}
    with folder_in_one_step(output, check) as partial:
        save_weights(model, tokenizers, partial, find_vocabulary_map(source), quantization)
        tokenizers.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        write_provenance(partial / PROVENANCE_NAME, source, **fields)
    return output


def save_weights(
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    folder: Path,
    vocabulary_map: Path | None,
    quantization: str | None = None,
) -> None:
    """Write weights, vocabularies and vocabulary map of a model for CTranslate2. Quantization changes the model's weights.

    Raises:
        ValueError: If CTranslate2 cannot express the model, or the model has no end of sequence or several.
    """
    config, settings = model.config, model.generation_config
    ends = config.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) != 1 or ends[0] is None:
        raise ValueError(f"CTranslate2 cannot express `eos_token_id` {ends}: it knows exactly one.")
    start = settings.decoder_start_token_id
    start = config.decoder_start_token_id if start is None else start
    with torch.inference_mode():
        spec = make_spec(model)
        targets = vocabulary(tokenizers.target, config.decoder_vocab_size)
        is_shared = tokenizers.is_joint and config.vocab_size == config.decoder_vocab_size
        spec.register_source_vocabulary(targets if is_shared else vocabulary(tokenizers.source, config.vocab_size))
        spec.register_target_vocabulary(targets)
        # CTranslate2 knows special tokens by name. It needs one for each.
        tokenizer = tokenizers.target
        spec.config.eos_token = targets[ends[0]]
        spec.config.unk_token = tokenizer.pad_token if tokenizer.unk_token is None else tokenizer.unk_token
        spec.config.bos_token = tokenizer.pad_token if tokenizer.bos_token is None else tokenizer.bos_token
        # A start that varies, such as a language code, comes with each call.
        varies = start is None or config.decoder_start_from_labels
        spec.config.decoder_start_token = None if varies else targets[start]
        spec.validate()
        spec.optimize(quantization)
        spec.save(os.fspath(folder))
    if vocabulary_map is not None:
        shutil.copyfile(vocabulary_map, folder / VOCABULARY_MAP_NAME)


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """Return `size` tokens in the order of their ids. An id without a token gets a name of its own."""
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    return [tokens.get(index, f"<unused_{index}>") for index in range(size)]


def find_obstacles(config: MetaphraseConfig) -> list[str]:
    """Return the options that CTranslate2 cannot express, each with its value and the reason."""
    obstacles = []
    if config.position_embedding_type == "alibi":
        obstacles.append("`position_embedding_type` 'alibi', which it has only in decoders")
    kind = (config.rope_parameters or {}).get("rope_type")
    if config.position_embedding_type == "rotary" and kind in _CHANGING_ROTATIONS:
        obstacles.append(f"`rope_parameters` with `rope_type` {kind!r}, whose frequencies change with the length")
    if config.qk_norm and config.decoder_attention_heads > 1:
        obstacles.append(
            f"`qk_norm` True with `decoder_attention_heads` {config.decoder_attention_heads}, because it norms the queries of "
            "the cross-attention over all heads at once"
        )
    if config.activation_function not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        obstacles.append(f"`activation_function` {config.activation_function!r}, which is none of {known}")
    return obstacles


def make_spec(model: PreTrainedModel) -> TransformerSpec:
    """Return the specification of a `MetaphraseForConditionalGeneration` with all weights, without vocabularies.

    Raises:
        ValueError: If CTranslate2 cannot express some options. The message names all of them.
    """
    config = model.config
    if obstacles := find_obstacles(config):
        raise ValueError(f"CTranslate2 cannot express {'; '.join(obstacles)}.")
    options = {
        # In Python this only decides on a norm at the end.
        "pre_norm": config.final_norm,
        "activation": _ACTIVATIONS[config.activation_function],
        "layernorm_embedding": config.embedding_norm,
        "relative_attention_bias": config.position_embedding_type in _BIASED,
        "ffn_glu": config.gated_mlp,
        # Anything but None keeps the decoder from requiring a table of positions.
        "rotary_dim": 0 if config.position_embedding_type == "rotary" else None,
        **_attention_options(config),
    }
    with torch.no_grad():
        encoder = TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **options)
        decoder = TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **options)
        spec = TransformerSpec(encoder, decoder)
        spec.config.layer_norm_epsilon = config.norm_eps
        _fill_stack(encoder, model.get_encoder(), config)
        _fill_stack(decoder, model.get_decoder(), config)
        _fill_linear(decoder.projection, model.lm_head)
        if config.logits_scale != 1.0:
            decoder.scale_outputs = float(config.logits_scale)
    return spec


def _attention_options(config: MetaphraseConfig) -> dict:
    heads = config.num_key_value_heads
    is_plain = heads == config.encoder_attention_heads == config.decoder_attention_heads
    return {
        "rms_norm": config.norm_type == "rmsnorm",
        "num_heads_kv": None if is_plain else heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
    }


def _fill_stack(spec: model_spec.LayerSpec, stack: nn.Module, config: MetaphraseConfig) -> None:
    spec.pre_norm = config.norm_position == "pre"
    spec.scale_embeddings = float(stack.embed_tokens.embed_scale)
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = stack.embed_tokens.weight
    if config.final_norm:
        _fill_norm(spec.layer_norm, stack.norm)
    if config.embedding_norm:
        _fill_norm(spec.layernorm_embedding, stack.embedding_norm)
    if stack.embed_positions is not None:
        spec.position_encodings.encodings = _position_table(stack, config)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        if stack.rotary_emb is not None:
            layer_spec.self_attention = _rotary_attention(stack.rotary_emb, config)
        _fill_attention(layer_spec.self_attention, layer.self_attn, stack.rotary_emb)
        _fill_norm(layer_spec.self_attention.layer_norm, layer.self_attn_norm)
        if config.position_embedding_type == "relative":
            bias = layer.self_attn.relative_position_bias if stack.position_bias is None else stack.position_bias
            layer_spec.self_attention.relative_attention_bias = bias.embedding.weight
        elif config.position_embedding_type == "none":
            # Without a bias CTranslate2 would add sinusoids.
            heads = layer.self_attn.q_proj.out_features // layer.self_attn.head_dim
            layer_spec.self_attention.relative_attention_bias = torch.zeros(4, heads)
        if config.position_embedding_type in _BIASED:
            distance = np.int32(config.relative_attention_max_distance)
            layer_spec.self_attention.relative_attention_max_distance = distance
        if hasattr(layer, "cross_attn"):
            _fill_attention(layer_spec.attention, layer.cross_attn, None)
            _fill_norm(layer_spec.attention.layer_norm, layer.cross_attn_norm)
        _fill_linear(layer_spec.ffn.linear_0, layer.mlp.gate_proj if config.gated_mlp else layer.mlp.up_proj)
        if config.gated_mlp:
            _fill_linear(layer_spec.ffn.linear_0_noact, layer.mlp.up_proj)
        _fill_linear(layer_spec.ffn.linear_1, layer.mlp.down_proj)
        _fill_norm(layer_spec.ffn.layer_norm, layer.mlp_norm)


def _position_table(stack: nn.Module, config: MetaphraseConfig) -> torch.Tensor:
    """Return the positions to add to the embeddings, shape (positions, H)."""
    positions = stack.embed_positions
    if config.position_embedding_type == "learned":
        return positions.weight[positions.offset :]
    length = max(config.max_position_embeddings, SINUSOIDAL_POSITIONS)
    # The model adds them in its own precision.
    return positions(torch.arange(length)[None], None)[0].to(stack.embed_tokens.weight.dtype)


def _rotary_attention(rotary: nn.Module, config: MetaphraseConfig) -> attention_spec.MultiHeadAttentionSpec:
    """Return a self-attention with our rotation; scaled frequencies become factors of the wavelengths."""
    base = config.rope_parameters["rope_theta"]
    rotated = 2 * len(rotary.inv_freq)
    # Rotating an odd width of a head also gives other frequencies.
    plain = base ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    is_plain = torch.allclose(plain.float(), rotary.inv_freq.float(), rtol=1e-6, atol=0.0)
    options = {}
    if not is_plain:
        # With two equal lengths only the wavelengths are scaled, in the same way for all texts.
        limit = max(2, config.max_position_embeddings)
        options = {
            "rotary_scaling_type": attention_spec.RotaryScalingType.Su,
            "original_max_position_embeddings": limit,
            "max_position_embeddings": limit,
        }
    spec = attention_spec.MultiHeadAttentionSpec(
        self_attention=True,
        rotary_dim=rotated,
        rotary_interleave=False,
        rotary_base=base,
        **_attention_options(config),
        **options,
    )
    if not is_plain:
        factors = (plain / rotary.inv_freq.double()).float()
        spec.rotary_scaling_long_factor = factors
        spec.rotary_scaling_short_factor = factors
    return spec


def _fill_attention(
    spec: attention_spec.MultiHeadAttentionSpec, attention: nn.Module, rotary: nn.Module | None
) -> None:
    """Fill projections and scale. The rotation's factor of queries and keys is folded into the queries."""
    spec.queries_scale = float(attention.scaling)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (_fill_linear(common_spec.LinearSpec(), projection) for projection in projections)
    gamma = attention.q_norm.weight if attention.config.qk_norm else None
    if rotary is not None and rotary.attention_scaling != 1.0:
        factors = torch.ones(attention.head_dim)
        factors[: 2 * len(rotary.inv_freq)] = rotary.attention_scaling**2
        if gamma is not None:
            gamma = (gamma.float() * factors).to(gamma.dtype)
        else:
            factors = factors.repeat(len(query.weight) // len(factors))
            query.weight = (query.weight.float() * factors[:, None]).to(query.weight.dtype)
            if query.has_bias():
                query.bias = (query.bias.float() * factors).to(query.bias.dtype)
    if gamma is not None:
        spec.q_norm.gamma = gamma
        _fill_norm(spec.k_norm, attention.k_norm)
    if attention.is_cross:
        utils.fuse_linear(spec.linear[0], [query])
        utils.fuse_linear(spec.linear[1], [key, value])
    else:
        utils.fuse_linear(spec.linear[0], [query, key, value])
    _fill_linear(spec.linear[-1], attention.o_proj)


def _fill_linear(spec: common_spec.LinearSpec, module: nn.Linear) -> common_spec.LinearSpec:
    spec.weight = module.weight.detach()
    if module.bias is not None:
        spec.bias = module.bias.detach()
    return spec


def _fill_norm(spec: common_spec.LayerNormSpec, norm: nn.Module) -> None:
    spec.gamma = norm.weight
    if isinstance(norm, nn.LayerNorm):
        spec.beta = norm.bias
