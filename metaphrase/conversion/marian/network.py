"""Marian's Transformer: its options as our configuration, its weights as ours, and folders of both.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344. The recurrent decoder (SSRU) is from Kim et al. 2019, From Research to
Production and Back: Ludicrously Fast Neural Machine Translation.
"""

import contextlib
import functools
import logging
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from metaphrase.conversion.checkpoints import (
    check_names,
    check_shape,
    our_skeleton,
    shapes,
    skeleton,
    stored_names,
    write_ours,
)
from metaphrase.conversion.families.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, HEAD_BIAS, Family
from metaphrase.conversion.marian.files import (
    find_vocabularies,
    read_model_file,
    read_vocabularies,
    read_vocabulary_map,
    write_npz,
)
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, listed
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME

logger = logging.getLogger(__name__)

# The name of this format, in the place of a family of transformers.
MARIAN_FILE = "marian-npz"
# Our fields, which hold for all of Marian's Transformers.
_FIXED_FIELDS = {
    "position_embedding_type": "sinusoidal",
    "sinusoidal_layout": "fairseq",
    "norm_type": "layernorm",
    "norm_eps": 1e-6,
    "gated_mlp": False,
    "attention_bias": True,
    "mlp_bias": True,
    "logits_bias": True,
    "train_padding_embedding": False,
    "bos_token_id": None,
}
_FREE_FIELDS = Family.free | {"dropout", "attention_dropout", "activation_dropout", "max_position_embeddings"}
_SIZES = {
    "hidden_size": "dim-emb",
    "encoder_layers": "enc-depth",
    "decoder_layers": "dec-depth",
    "encoder_attention_heads": "transformer-heads",
    "encoder_ffn_dim": "transformer-dim-ffn",
}
_OFF = (
    *("layer-normalization", "output-omit-bias", "right-left", "transformer-no-projection", "transformer-pool"),
    *("transformer-train-position-embeddings", "ulr"),
)
# Marian's options by the only values that fit. The first is the default.
_FIXED_OPTIONS: dict[str, tuple] = {
    "type": ("transformer",),
    "input-types": ([], ["sequence", "sequence"]),
    "transformer-ffn-depth": (2,),
    **dict.fromkeys(_OFF, (False,)),
}
# Options of other networks, which Marian writes into every file.
_OTHER_NETWORKS: dict[str, Any] = {
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-type": "bidirectional",
    "skip": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-dim-aan": 2048,
    "transformer-guided-alignment-layer": "last",
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
}
_CHOICES: dict[str, dict[Any, Any]] = {
    # Marian approximates gelu by a sigmoid.
    "transformer-ffn-activation": {"relu": "relu", "swish": "silu", "gelu": "quick_gelu"},
    # n normalizes, a adds the input.
    "transformer-preprocess": {"": "post", "n": "pre"},
    "transformer-postprocess": {"an": "post", "a": "pre"},
    "transformer-postprocess-emb": {"": False, "n": True},
    "transformer-postprocess-top": {"": False, "n": True},
    "transformer-decoder-autoreg": {"self-attention": "attention", "rnn": "ssru"},
}
_TIES = ("tied-embeddings", "tied-embeddings-src", "tied-embeddings-all")
_KNOWN = {*_FIXED_OPTIONS, *_OTHER_NETWORKS, *_CHOICES, *_SIZES.values(), *_TIES, "version", "dim-vocabs", "dec-cell"}
_KNOWN |= {"transformer-decoder-dim-ffn", "transformer-tied-layers", "transformer-depth-scaling", "factors-combine"}
_PARTS = {
    "self_attn": "self",
    "cross_attn": "context",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "up_proj": "1",
    "down_proj": "2",
    "input_proj": "",
    "forget_proj": "f",
}
# Marian starts the decoder with zeros. Ours starts with padding, whose row follows those of Marian and holds zeros. Its bias
# keeps it out of every target.
_PADDING_BIAS = -1e4
_MATRIX = "_proj.weight"
_WITH_PADDING = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)


def read_config(options: Mapping[str, Any], num_tokens: int, eos_token_id: int) -> MetaphraseConfig:
    """Return the configuration of a network.

    Args:
        options: Options of Marian, as in `special:model.yml`.
        num_tokens: Size of each vocabulary, without padding.
        eos_token_id: The end of sequence.

    Raises:
        ValueError: If an option changes the network in a way that Metaphrase lacks. The message names option and value.
    """
    for name, value in options.items():
        if value and name not in _KNOWN:
            _refuse(name, "off", value)
    for name, allowed in _FIXED_OPTIONS.items():
        if options.get(name, allowed[0]) not in allowed:
            _refuse(name, " or ".join(map(repr, allowed)), options[name])
    sizes = {field: options.get(name) for field, name in _SIZES.items()}
    sizes["decoder_ffn_dim"] = options.get("transformer-decoder-dim-ffn") or sizes["encoder_ffn_dim"]
    for name, value in zip((*_SIZES.values(), "transformer-decoder-dim-ffn"), sizes.values(), strict=True):
        if type(value) is not int or value < 1:
            _refuse(name, "a number above 0", value)
    activation, norm_position, behind, norm_emb, norm_top, recurrence = (_choose(options, name) for name in _CHOICES)
    if behind != norm_position:
        expected = "dan" if norm_position == "post" else "da"
        _refuse("transformer-postprocess", expected, options.get("transformer-postprocess"))
    if recurrence == "ssru" and options.get("dec-cell") != "ssru":
        _refuse("dec-cell", "ssru", options.get("dec-cell"))
    tied, tied_src, tied_all = (bool(options.get(name)) for name in _TIES)
    return MetaphraseConfig(
        **_FIXED_FIELDS,
        **sizes,
        decoder_self_attention=recurrence,
        decoder_attention_heads=sizes["encoder_attention_heads"],
        activation_function=activation,
        norm_position=norm_position,
        embedding_norm=norm_emb,
        final_norm=norm_top,
        share_embeddings=tied_all or tied_src,
        tie_word_embeddings=tied_all or tied,
        vocab_size=num_tokens + 1,
        pad_token_id=num_tokens,
        eos_token_id=eos_token_id,
        decoder_start_token_id=num_tokens,
        dtype="float32",
    )


def _choose(options: Mapping[str, Any], name: str) -> Any:
    choices, default = _CHOICES[name], next(iter(_CHOICES[name]))
    value = options.get(name, default)
    # d is dropout.
    letters = value.replace("d", "") if isinstance(value, str) and "process" in name else value
    if not isinstance(letters, str) or letters not in choices:
        _refuse(name, " or ".join(repr(choice) for choice in choices), value)
    return choices[letters]


def _refuse(name: str, expected: str, value: Any) -> None:
    raise ValueError(f"`{name}` in special:model.yml must be {expected}, got {reprlib.repr(value)}.")


def write_options(config: MetaphraseConfig) -> dict[str, Any]:
    """Return Marian's options of a model.

    Raises:
        ValueError: If the model has options that Marian lacks. The message names all of them.
    """
    recurrence = config.decoder_self_attention
    values = (config.activation_function, config.norm_position, config.norm_position, config.embedding_norm)
    values += (config.final_norm, recurrence)
    # A value without a counterpart becomes the default, and is an obstacle below.
    chosen = {
        name: next((theirs for theirs, ours in choices.items() if ours == value), next(iter(choices)))
        for (name, choices), value in zip(_CHOICES.items(), values, strict=True)
    }
    size = config.vocab_size - 1
    options = {name: allowed[0] for name, allowed in _FIXED_OPTIONS.items()} | _OTHER_NETWORKS | chosen
    options |= {name: getattr(config, field) for field, name in _SIZES.items()}
    options |= {
        "dec-cell": "ssru" if recurrence == "ssru" else "gru",
        "dim-vocabs": [size, size],
        "tied-embeddings": config.tie_word_embeddings and not config.share_embeddings,
        "tied-embeddings-src": config.share_embeddings and not config.tie_word_embeddings,
        "tied-embeddings-all": config.share_embeddings and config.tie_word_embeddings,
        "transformer-decoder-dim-ffn": config.decoder_ffn_dim,
        "transformer-tied-layers": [],
    }
    # For dropout in training, Marian's usual spelling.
    options["transformer-postprocess"] = f"d{options['transformer-postprocess']}"
    expected = read_config(options, size, config.eos_token_id)
    fields = [name for name in MetaphraseConfig.__annotations__ if name not in _FREE_FIELDS]
    if obstacles := [
        f"`{name}` must be {getattr(expected, name)}, got {getattr(config, name)}"
        for name in fields
        if getattr(config, name) != getattr(expected, name)
    ]:
        raise ValueError(f"The model is none of Marian's: {'; '.join(obstacles)}.")
    return options


def marian_name(name: str, config: MetaphraseConfig, decoder_layers: Sequence[int]) -> str:
    """Return the name of the weight of Marian that holds one of ours.

    Args:
        name: Name of our weight.
        config: Configuration of the model.
        decoder_layers: Number of Marian's layer for each of our decoder layers. Tied layers share a number.
    """
    if name in (HEAD, HEAD_BIAS):
        return "decoder_ff_logit_out_" + ("Wt" if name == HEAD else "b")
    _, stack, *parts = name.split(".")
    # A norm in front of a sublayer has a suffix.
    norm = {"weight": "ln_scale", "bias": "ln_bias"}[parts[-1]]
    match parts:
        case ["embed_tokens", _]:
            return "Wemb" if config.share_embeddings else f"{stack}_Wemb"
        case ["embedding_norm", _]:
            return f"{stack}_emb_{norm}_pre"
        case ["norm", _]:
            return f"{stack}_top_{norm}"
    index, sublayer, *rest = parts[1:-1]
    layer = f"{stack}_l{decoder_layers[int(index)] if stack == 'decoder' else int(index) + 1}"
    is_recurrent = stack == "decoder" and config.decoder_self_attention == "ssru"
    is_norm = sublayer.endswith("_norm")
    sublayer = sublayer.removesuffix("_norm")
    part = "rnn" if is_recurrent and sublayer == "self_attn" else "ffn" if sublayer == "mlp" else _PARTS[sublayer]
    if not is_norm:
        return f"{layer}_{part}_{'W' if parts[-1] == 'weight' else 'b'}{_PARTS[rest[0]]}"
    is_pre_norm = config.norm_position == "pre"
    # Marian gives a norm the prefix of its sublayer, but for the norm in front of a recurrence.
    prefix = {"ffn": "_ffn", "rnn": "" if is_pre_norm else "_ffn"}.get(part, "_Wo")
    return f"{layer}_{part}{prefix}_{norm}{'_pre' if is_pre_norm else ''}"


def marian_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of Marian's weight for one of ours, by our name and shape."""
    if name in _WITH_PADDING:
        return shape[0] - 1, shape[1]
    return (1, shape[0] - (name == HEAD_BIAS)) if len(shape) == 1 else (shape[1], shape[0])


def to_ours(name: str, weight: np.ndarray) -> torch.Tensor:
    """Return our weight `name` from that of Marian."""
    if name in _WITH_PADDING:
        ours = np.concatenate((weight, np.zeros_like(weight[:1])))
    elif name == HEAD_BIAS:
        ours = np.append(weight[0], np.float32(_PADDING_BIAS))
    else:
        ours = weight.T if name.endswith(_MATRIX) else weight[0]
    return torch.from_numpy(np.array(ours, dtype=np.float32))


def to_marian(name: str, weight: torch.Tensor) -> np.ndarray:
    """Return Marian's weight from our weight `name`.

    Raises:
        ValueError: If the embedding of padding is not zero. Marian starts the decoder with zeros.
    """
    ours = weight.float().numpy()
    if name in (ENCODER_EMBEDDING, DECODER_EMBEDDING) and ours[-1].any():
        raise ValueError(f"The last row of `{name}`, that of padding, must hold zeros, as Marian starts the decoder.")
    if name in _WITH_PADDING:
        return ours[:-1]
    return ours[None, : -1 if name == HEAD_BIAS else None] if ours.ndim == 1 else np.ascontiguousarray(ours.T)


def read_marian(file: Path, output: Path, max_shard_size: int | str) -> None:
    """Write our checkpoint of a model file of Marian, with the vocabularies and the shortlist beside it."""
    tokenizers = read_vocabularies(find_vocabularies(file.parent))
    options, weights = read_model_file(file)
    config = read_config(options, tokenizers.target.pad_token_id, tokenizers.target.eos_token_id)
    decoder_layers = options.get("transformer-tied-layers") or range(1, config.decoder_layers + 1)
    if isinstance(decoder_layers, int | str) or len(decoder_layers) != config.decoder_layers:
        _refuse("transformer-tied-layers", f"{config.decoder_layers} layers", decoder_layers)
    model = skeleton(MetaphraseForConditionalGeneration, config)
    our_shapes = shapes(model)
    names = {name: marian_name(name, config, decoder_layers) for name in stored_names(model)}
    check_names(names.values(), weights, {*names.values()})
    planned = {}
    for name, theirs in names.items():
        check_shape(theirs, weights[theirs].shape, marian_shape(name, our_shapes[name]))
        planned[name] = PlannedTensor(weights[theirs].nbytes, functools.partial(to_ours, name, weights[theirs]))
    # Marian writes no unknown token, and has the limit of 512 tokens in models of OPUS-MT.
    ids = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    generation = GenerationConfig(**ids, max_length=512, suppress_tokens=[tokenizers.target.unk_token_id])
    write_ours(output, model, planned, generation, max_shard_size)
    tokenizers.save_pretrained(output)
    shortlists = sorted(file.parent.glob("lex*.bin"))
    if len(shortlists) == 1:
        read_vocabulary_map(shortlists[0], tokenizers).save(output / VOCABULARY_MAP_NAME, tokenizers)
    elif shortlists:
        names = [path.name for path in shortlists]
        logger.warning("The shortlists are left behind: there must be one, got %s.", listed(names))


def write_marian(folder: Path, output: Path) -> None:
    """Write `model.npz` of a folder with our checkpoint."""
    config = MetaphraseConfig.from_pretrained(folder)
    options = write_options(config)
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        arrays = {
            marian_name(name, config, range(1, config.decoder_layers + 1)): to_marian(name, weights.read(name))
            for name in stored_names(our_skeleton(folder, weights))
        }
    write_npz(output / "model.npz", options, arrays)
    if not any(folder.glob("*.spm")):
        logger.warning("%s holds no vocabulary *.spm: put that of the model of Marian beside model.npz.", folder)
