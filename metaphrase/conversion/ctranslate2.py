"""Export to CTranslate2, and to Argos Translate, which runs it: a zip with the model and that of sentencepiece."""

import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.conversion.checkpoints import RARE_FIELDS, export_folder, find_folder, position_table
from metaphrase.conversion.marian import sentencepiece_model
from metaphrase.conversion.vocabulary_map import VOCABULARY_MAP_NAME, find_vocabulary_map
from metaphrase.errors import MetaphraseError, naming_extra
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import STACKS
from metaphrase.storage.folders import file_in_one_step, json_text, read_json
from metaphrase.tokenization import TokenizerPair

with naming_extra("ctranslate2", "CTranslate2"):
    import ctranslate2  # noqa: F401 (the engine takes it from here)
    from ctranslate2.converters import utils
    from ctranslate2.specs import attention_spec, common_spec, model_spec
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec

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
_ARGOS_SUFFIX = ".argosmodel"


def export_ctranslate2(
    source: str | os.PathLike, output: str | os.PathLike, *, quantization: str | None = None, overwrite: bool = False
) -> Path:
    """Export a Metaphrase model to a CTranslate2 folder, which appears only when it is complete.

    Args:
        quantization: Type of the weights, one of CTranslate2's, such as int8. None keeps the checkpoint's type.

    Raises:
        MetaphraseError: If CTranslate2 cannot express the model, weights are missing, or an argument is invalid.
    """

    def write(model: PreTrainedModel, tokenizers: TokenizerPair, folder: Path) -> None:
        save_weights(model, tokenizers, folder, find_vocabulary_map(source), quantization)

    provenance = {"to": "ctranslate2"} | ({"quantization": quantization} if quantization else {})
    return export_folder(source, output, overwrite, write, find_obstacles, provenance, dtype="auto")


def save_weights(
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    folder: Path,
    vocabulary_map: Path | None,
    quantization: str | None = None,
) -> None:
    """Write weights, vocabularies and vocabulary map of a model for CTranslate2. Quantization changes the model's weights."""
    config, settings = model.config, model.generation_config
    ends = config.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) != 1 or ends[0] is None:
        raise MetaphraseError(f"CTranslate2 cannot express `eos_token_id` {ends}: it knows exactly one.")
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
    """Return the options that CTranslate2 cannot express, each with its value."""
    positions, rotation = config.position_embedding_type, config.rope_parameters or {}
    widths = [int(config.stack_sizes(stack).head_dim * rotation.get("partial_rotary_factor", 1.0)) for stack in STACKS]
    is_scaled = rotation.get("rope_type") != "default"
    obstacles = {name: getattr(config, name) != value for name, value in RARE_FIELDS.items()} | {
        "norm_position": config.norm_position == "both",
        "position_embedding_type": positions in ("alibi", "none"),
        # CTranslate2 rotates pairs, by frequencies that nothing scales.
        "rope_parameters": positions == "rotary" and (is_scaled or any(width % 2 for width in widths)),
        # It norms the queries of the cross-attention over all heads at once.
        "qk_norm": config.qk_norm,
        "activation_function": config.activation_function not in _ACTIVATIONS,
    }
    return [f"`{name}` {getattr(config, name)!r}" for name, is_obstacle in obstacles.items() if is_obstacle]


def make_spec(model: PreTrainedModel) -> TransformerSpec:
    """Return the specification of a model without obstacles, with all weights and without vocabularies."""
    config, heads = model.config, model.config.num_key_value_heads
    is_plain = heads == config.encoder_attention_heads == config.decoder_attention_heads
    options = {
        # In Python this only decides on a norm at the end.
        "pre_norm": config.final_norm,
        "activation": _ACTIVATIONS[config.activation_function],
        "layernorm_embedding": config.embedding_norm,
        "relative_attention_bias": config.position_embedding_type == "relative",
        "ffn_glu": config.gated_mlp,
        "rms_norm": config.norm_type == "rmsnorm",
        "num_heads_kv": None if is_plain else heads,
        "head_dim": config.head_dim,
    }
    stacks = {TransformerEncoderSpec: model.get_encoder(), TransformerDecoderSpec: model.get_decoder()}
    with torch.no_grad():
        encoder, decoder = (_make_stack(kind, stack, config, options) for kind, stack in stacks.items())
        spec = TransformerSpec(encoder, decoder)
        spec.config.layer_norm_epsilon = config.norm_eps
        _fill_linear(decoder.projection, model.lm_head)
        if config.logits_scale != 1.0:
            decoder.scale_outputs = float(config.logits_scale)
    return spec


def _make_stack(kind: type, stack: nn.Module, config: MetaphraseConfig, options: dict) -> model_spec.LayerSpec:
    if stack.rotary_emb is not None:
        theta, width = config.rope_parameters["rope_theta"], 2 * len(stack.rotary_emb.inv_freq)
        options = options | {"rotary_dim": width, "rotary_interleave": False, "rotary_base": theta}
    spec = kind(len(stack.layers), stack.sizes.attention_heads, **options)
    spec.pre_norm = config.norm_position == "pre"
    spec.scale_embeddings = float(stack.embed_tokens.embed_scale)
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = stack.embed_tokens.weight
    if config.final_norm:
        _fill_norm(spec.layer_norm, stack.norm)
    if config.embedding_norm:
        _fill_norm(spec.layernorm_embedding, stack.embedding_norm)
    if stack.embed_positions is not None:
        # The model adds them in its own precision.
        table = position_table(stack.embed_positions, config)
        spec.position_encodings.encodings = table.to(stack.embed_tokens.weight.dtype)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _fill_attention(layer_spec.self_attention, layer.self_attn)
        _fill_norm(layer_spec.self_attention.layer_norm, layer.self_attn_norm)
        if config.position_embedding_type == "relative":
            bias = layer.self_attn.relative_position_bias if stack.position_bias is None else stack.position_bias
            layer_spec.self_attention.relative_attention_bias = bias.embedding.weight
            distance = np.int32(config.relative_attention_max_distance)
            layer_spec.self_attention.relative_attention_max_distance = distance
        if hasattr(layer, "cross_attn"):
            _fill_attention(layer_spec.attention, layer.cross_attn)
            _fill_norm(layer_spec.attention.layer_norm, layer.cross_attn_norm)
        _fill_linear(layer_spec.ffn.linear_0, layer.mlp.gate_proj if config.gated_mlp else layer.mlp.up_proj)
        if config.gated_mlp:
            _fill_linear(layer_spec.ffn.linear_0_noact, layer.mlp.up_proj)
        _fill_linear(layer_spec.ffn.linear_1, layer.mlp.down_proj)
        _fill_norm(layer_spec.ffn.layer_norm, layer.mlp_norm)
    return spec


def _fill_attention(spec: attention_spec.MultiHeadAttentionSpec, attention: nn.Module) -> None:
    spec.queries_scale = float(attention.scaling)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = [_fill_linear(common_spec.LinearSpec(), projection) for projection in projections]
    for fused, parts in zip(spec.linear, [linears[:1], linears[1:]] if attention.is_cross else [linears], strict=False):
        utils.fuse_linear(fused, parts)
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


def export_argos(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    source_language: tuple[str, str],
    target_language: tuple[str, str],
    quantization: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a Metaphrase model to a package of Argos Translate, which appears only when it is complete.

    Args:
        source: Folder or Hub id of a Metaphrase model for one pair of languages, with one tokenizer of the kind `unigram`.
        output: The file to write, such as `en_de.argosmodel`.
        source_language: Code and name of the language of sources, such as en and English.
        target_language: The same for targets.
        quantization: Type of the weights, as for `export_ctranslate2`.

    Raises:
        MetaphraseError: If the model or its tokenizer cannot be expressed, or an argument is invalid.
    """
    output = Path(output)
    if output.suffix != _ARGOS_SUFFIX or output.is_dir():
        raise MetaphraseError(f"`output` must be a file that ends in {_ARGOS_SUFFIX}, got {str(output)!r}.")
    if output.exists() and not overwrite:
        raise MetaphraseError(f"`output` must not exist, got {output}. Pass --overwrite to replace it.")
    codes, names = zip(source_language, target_language, strict=True)
    for code in codes:
        # The code is part of a path.
        if not re.fullmatch("[a-z]{2,3}", code):
            raise MetaphraseError(f"The code of a language must have two or three letters, such as en, got {code!r}.")
    folder = find_folder(source)
    tokenizers = TokenizerPair.from_pretrained(folder)
    pieces = sentencepiece_model(tokenizers.source) if tokenizers.is_joint else None
    if pieces is None:
        model = tokenizers.source.backend_tokenizer.model if tokenizers.source.is_fast else tokenizers.source
        kind = type(model).__name__ if tokenizers.is_joint else "two tokenizers"
        text = "Train one with `tokenizer_kind: unigram`, or run `metaphrase serve`"
        raise MetaphraseError(f"`export` needs one tokenizer of the kind unigram, not normalized, got {kind}. {text}.")
    metadata = {"package_version": "1.0", "argos_version": "1.11", "type": "translate"}
    metadata |= {"from_code": codes[0], "from_name": names[0], "to_code": codes[1], "to_name": names[1]}
    card = folder / "README.md"
    readme = card.read_text(encoding="utf-8") if card.is_file() else f"# {names[0]} to {names[1]}\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary, file_in_one_step(output) as partial:
        exported = export_ctranslate2(folder, Path(temporary, "model"), quantization=quantization)
        config = read_json(exported / "config.json")
        if config["decoder_start_token"] is None:
            raise MetaphraseError("Argos Translate cannot express a start of targets that varies.")
        # Argos Translate encodes without an end of sequence.
        contents = {
            "metadata.json": json_text(metadata),
            "README.md": readme,
            "sentencepiece.model": pieces,
            "model/config.json": json_text(config | {"add_source_eos": True}),
        }
        # The packages of all models are unpacked in one folder.
        root = f"translate-{codes[0]}_{codes[1]}"
        with zipfile.ZipFile(partial, "w") as file:
            for name, content in contents.items():
                file.writestr(f"{root}/{name}", content)
            for path in [exported / "model.bin", *sorted(exported.glob("*_vocabulary.json"))]:
                file.write(path, f"{root}/model/{path.name}")
    return output
