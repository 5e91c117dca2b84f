"""Marian's Transformer: its options, weights, vocabularies and lexical shortlists, in its own files and in ours.

Numbers in these files are sizes of what follows. numpy checks each against the file before anything is read.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344. The recurrent decoder (SSRU) is from Kim et al. 2019, From Research to
Production and Back: Ludicrously Fast Neural Machine Translation. The tokenizers give the ids of SentencePiece without its
library: Kudo and Richardson 2018, arXiv 1808.06226.
"""

import base64
import contextlib
import copy
import functools
import json
import logging
import math
import os
import re
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.conversion import checkpoints
from metaphrase.conversion.families import family
from metaphrase.conversion.families.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, HEAD_BIAS
from metaphrase.conversion.vocabulary_map import VOCABULARY_MAP_NAME, VocabularyMap
from metaphrase.errors import MetaphraseError, naming_damaged_file
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import SSRU
from metaphrase.storage.folders import read_fields
from metaphrase.storage.weight_files import PlannedTensor, WeightFiles, listed
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_trainer import fast_tokenizer

logger = logging.getLogger(__name__)

OPTIONS_NAME = "special:model.yml"
# Marian's number of a type is a class and a width in bytes.
_FLOAT32, _INT8, _INTGEMM8 = 0x404, 0x101, 0x4101
_SHORTLIST_MAGIC = 0xF11A48D5013417F5

_PADDING = "<pad>"
# Fields of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SPACE_IS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE = 2, 3, 4, 5
_UNIGRAM = 1
# Types of pieces.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def find_model_file(source: str | os.PathLike) -> Path | None:
    """Return the model file of Marian that a path names or holds, or None for a folder of transformers and for other names."""
    path = Path(source)
    names = [] if (path / CONFIG_NAME).exists() else [path, *sorted(path.glob("*"))]
    files = [file for file in names if file.suffix in (".npz", ".bin") and file.is_file()]
    files = [file for file in files if OPTIONS_NAME.encode() in file.read_bytes()]
    if len(files) > 1:
        raise MetaphraseError(f"`source` must be one of the models in {path}: {listed([file.name for file in files])}.")
    return files[0] if files else None


def read_model_file(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the options of a network, and its weights in float32 by Marian's names.

    Weights of 8 bits (intgemm) are multiplied out. Factors of activations, which 8 bits need, are dropped.
    """
    # numpy leaves a damaged file open.
    with naming_damaged_file(path, "a whole file of Marian"), open(path, "rb") as file:
        arrays = dict(np.load(file)) if path.suffix == ".npz" else _read_bin(path)
        options = dict(yaml.safe_load(arrays.pop(OPTIONS_NAME).tobytes().rstrip(b"\0").decode()))
    weights = {name: array for name, array in arrays.items() if not name.endswith("_QuantMultA")}
    for name, weight in weights.items():
        if weight.dtype != np.float32 or not np.isfinite(weight).all():
            raise MetaphraseError(f"`{name}` of {path} must hold finite numbers in float32, got {weight.dtype}.")
    return options, weights


def _make_reader(path: Path) -> Callable[[str, int], np.ndarray]:
    """Return a function that returns the next numbers of a file, by their type and count."""
    content, offset = path.read_bytes(), 0

    def read(dtype: str, count: int) -> np.ndarray:
        nonlocal offset
        numbers = np.frombuffer(content, dtype, count, offset) if count else np.empty(0, dtype)
        offset += numbers.nbytes
        return numbers

    return read


def _read_bin(path: Path) -> dict[str, np.ndarray]:
    read = _make_reader(path)
    _, num_items = read("<u8", 2).tolist()
    headers = read("<u8", 4 * num_items).reshape(-1, 4).tolist()
    names = [read("u1", name_length).tobytes().rstrip(b"\0").decode() for name_length, *_ in headers]
    array_shapes = [tuple(read("<u4", rank).tolist()) for _, _, rank, _ in headers]
    [padding] = read("<u8", 1).tolist()
    read("u1", padding)
    arrays = {}
    for name, shape, (_, kind, _, nbytes) in zip(names, array_shapes, headers, strict=True):
        data, size = read("u1", nbytes), math.prod(shape)
        if kind == _FLOAT32:
            arrays[name] = data[: 4 * size].view("<f4").reshape(shape)
            continue
        # It is unknown whether a separate head of 8 bits is stored transposed.
        if kind not in (_INT8, _INTGEMM8) or (kind == _INTGEMM8 and name.endswith("_Wt")):
            raise MetaphraseError(f"`{name}` must be of float32 or 8 bits (intgemm8), got type {kind:#x}")
        numbers = data[:size].view("i1")
        if kind == _INTGEMM8:
            [factor] = data[size : size + 4].copy().view("<f4")
            with np.errstate(all="ignore"):
                numbers = numbers.astype(np.float32) / factor
        # All matrices of 8 bits but embeddings are stored transposed.
        is_transposed = kind == _INTGEMM8 and not name.endswith("Wemb")
        arrays[name] = numbers.reshape(shape[::-1]).T if is_transposed else numbers.reshape(shape)
    return arrays


def read_vocabularies(folder: Path) -> TokenizerPair:
    """Return the tokenizers of a model by the file of a joint vocabulary, or those of both sides. Padding follows the pieces."""
    paths = sorted(folder.glob("*.spm"))
    if len(paths) > 1:
        sides = [[path for path in paths if re.search(side, path.name)] for side in ("src|source", "trg|target")]
        paths = [path for side in sides for path in side] if [len(side) for side in sides] == [1, 1] else []
    if not paths:
        names = ", ".join(sorted(path.name for path in folder.glob("*.spm"))) or "none"
        text = "A model of Marian must have one vocabulary *.spm beside it, or source.spm and target.spm"
        raise MetaphraseError(f"{text}, got {names} in {folder}.")
    tokenizers = []
    for path in paths:
        with naming_damaged_file(path, "a unigram model of SentencePiece"):
            tokenizers.append(_make_tokenizer(path.read_bytes()))
    source, target = tokenizers[0], tokenizers[-1]
    one, other = ((len(side), side.eos_token_id, side.unk_token_id) for side in (source, target))
    if one != other:
        raise MetaphraseError(f"Both vocabularies must have one size and the same special ids, got {one} and {other}.")
    return TokenizerPair(source, target)


def _make_tokenizer(content: bytes) -> PreTrainedTokenizerFast:
    fields = list(_read_message(content))
    pieces = [dict(_read_message(value)) for number, value in fields if number == _PIECES]
    trainer, normalizer = (
        dict(_read_message(b"".join(value for number, value in fields if number == wanted)))
        for wanted in (_TRAINER, _NORMALIZER)
    )
    vocabulary = [(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]) for piece in pieces]
    kinds = [piece.get(3, _NORMAL) for piece in pieces]
    names = [name for name, _ in vocabulary]
    is_unigram = trainer.get(_MODEL_TYPE, _UNIGRAM) == _UNIGRAM
    marks_spaces = not trainer.get(_SPACE_IS_SUFFIX) and normalizer.get(_ESCAPE, 1)
    has_different_pieces = len({*names}) == len(names) and kinds.count(_UNKNOWN) == 1
    if not is_unigram or not marks_spaces or not has_different_pieces or "</s>" not in names or _PADDING in names:
        raise MetaphraseError(f"unmarked spaces, or pieces that are not unique, lack </s> or <unk>, or hold {_PADDING}")
    has_bytes, unknown = bool(trainer.get(_BYTE_FALLBACK)), kinds.index(_UNKNOWN)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=has_bytes))
    steps = [normalizers.Precompiled(normalizer[_CHARSMAP])] if normalizer.get(_CHARSMAP) else []
    if normalizer.get(_REMOVE_SPACES, 1):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if normalizer.get(_DUMMY_PREFIX, 1) else "never"
    splits = [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)]
    if whole := sorted((names[i] for i, kind in enumerate(kinds) if kind == _USER_DEFINED), key=len, reverse=True):
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, whole))), behavior="isolated"))
    # Text such as `</s>` is cut behind its first character, so that it is no control token.
    controls = (name for name, kind in zip(names, kinds, strict=True) if kind not in (_NORMAL, _USER_DEFINED) and name)
    cuts = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in controls)
    splits.append(pre_tokenizers.Split(Regex(cuts), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if scheme == "always" else []))
    end = names.index("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", end)]
    )
    tokens = {"eos_token": "</s>", "unk_token": names[unknown], "pad_token": _PADDING}
    return fast_tokenizer(tokenizer, **tokens, split_special_tokens=True)


def _read_message(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message in the format of Protocol Buffers."""
    offset = 0

    def read_number() -> int:
        nonlocal offset
        byte = content[offset]
        offset += 1
        return byte if byte < 128 else byte - 128 + 128 * read_number()

    while offset < len(content):
        key = read_number()
        if key & 7 == 0:
            yield key >> 3, read_number()
            continue
        # Bytes with their length in front, 8 bytes, or 4 bytes.
        length = read_number() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if length > len(content) - offset:
            raise MetaphraseError("it is damaged")
        yield key >> 3, content[offset : offset + length]
        offset += length


def sentencepiece_model(tokenizer: PreTrainedTokenizerBase, omit_padding: bool = False) -> bytes | None:
    """Return SentencePiece's model for a `unigram` tokenizer without `normalization`, or None. Texts begin without a space."""
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    model, splits = state["model"], (state.get("pre_tokenizer") or {}).get("pretokenizers", [])
    steps = {step["type"]: step for step in (state.get("normalizer") or {}).get("normalizers", [])}
    is_marked = [step["type"] for step in splits[:2]] == ["Metaspace", "Split"]
    if model.get("type") != "Unigram" or not is_marked or not steps.keys() <= {"Precompiled", "Replace"}:
        return None
    *whole, controls = (step["pattern"]["Regex"] for step in splits[1:])
    whole += [re.escape(token["content"]) for token in state["added_tokens"] if not token["special"]]
    types = {_USER_DEFINED: "|".join(whole), _BYTE: "<0x[0-9A-F]{2}>" if model["byte_fallback"] else ""}
    types[_CONTROL] = f"(?:{controls}).*"
    kinds = [next((kind for kind in types if re.fullmatch(types[kind], name)), _NORMAL) for name, _ in model["vocab"]]
    kinds[model["unk_id"]] = _UNKNOWN
    # Field 2 of a piece is its score, and field 3 its type.
    pieces = b"".join(
        _field(_PIECES, _field(1, name.encode()) + struct.pack("<BfBB", 0x15, score, 0x18, kind))
        for kind, (name, score) in zip(kinds, model["vocab"], strict=True)
        if not omit_padding or name != tokenizer.pad_token
    )
    # The number of the trainer's field takes two bytes.
    trainer = _field(_TRAINER, b"\x98\x02\x01" if model["byte_fallback"] else b"")
    charsmap = base64.b64decode(steps.get("Precompiled", {}).get("precompiled_charsmap", ""))
    flags = _DUMMY_PREFIX << 3, splits[0]["prepend_scheme"] != "never", _REMOVE_SPACES << 3, "Replace" in steps
    return pieces + trainer + _field(_NORMALIZER, _field(_CHARSMAP, charsmap) + bytes(flags))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in the format of Protocol Buffers: number and type, length in four bytes, content."""
    size = [len(content) >> shift & 127 | 128 for shift in (0, 7, 14)]
    return bytes([number << 3 | 2, *size, len(content) >> 21]) + content


def _read_vocabulary_map(path: Path, tokenizers: TokenizerPair) -> VocabularyMap:
    """Return the vocabulary map of a binary lexical shortlist. With a joint vocabulary, a source token also permits itself."""
    num_tokens, end = tokenizers.source.pad_token_id, tokenizers.target.eos_token_id
    with naming_damaged_file(path, f"the shortlist of {num_tokens} tokens"):
        read = _make_reader(path)
        magic, _, num_first, _, num_offsets, num_ids = read("<u8", 6).tolist()
        offsets, ids = read("<u8", num_offsets), read("<u4", num_ids)
        is_ascending = num_offsets == num_tokens + 1 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= num_ids
        if magic != _SHORTLIST_MAGIC or not is_ascending or max(num_first, ids.max(initial=0) + 1) > num_tokens:
            raise MetaphraseError(f"{num_offsets} offsets of {num_ids} tokens")
    targets = np.split(ids, offsets[1:-1].astype(np.int64))
    if tokenizers.is_joint:
        targets = [np.append(ids, np.uint32(index)) for index, ids in enumerate(targets)]
    return VocabularyMap([*{*range(num_first), end}], dict(enumerate(targets)))


# The name of this format, in the place of a family of transformers.
MARIAN_FILE = "marian-npz"
# Our fields, which hold for all of Marian's Transformers.
_FIXED_FIELDS = {"position_embedding_type": "sinusoidal", "sinusoidal_layout": "fairseq", "norm_type": "layernorm"}
_FIXED_FIELDS |= {"norm_eps": 1e-6, "gated_mlp": False, "attention_bias": True, "mlp_bias": True, "logits_bias": True}
_FIXED_FIELDS |= {"train_padding_embedding": False, "bos_token_id": None}
_FREE_FIELDS = family.Family.free | {"dropout", "attention_dropout", "activation_dropout", "max_position_embeddings"}
_SIZES = {"hidden_size": "dim-emb", "encoder_layers": "enc-depth", "decoder_layers": "dec-depth"}
_SIZES |= {"encoder_attention_heads": "transformer-heads", "encoder_ffn_dim": "transformer-dim-ffn"}
_OFF = (
    *("layer-normalization", "output-omit-bias", "right-left", "transformer-no-projection", "transformer-pool"),
    *("transformer-train-position-embeddings", "ulr"),
)
# Marian's options by the only values that fit. The first is the default.
_FIXED_OPTIONS: dict[str, tuple] = {
    "type": ("transformer",),
    "input-types": ([], ["sequence", "sequence"]),
    "transformer-ffn-depth": (2,),
    "transformer-attention-mask": ("default",),
    **dict.fromkeys(_OFF, (False,)),
}
# Options of other networks, which Marian writes into every file.
_OTHER_NETWORKS = yaml.safe_load(Path(__file__).with_name("marian_options.yml").read_text(encoding="utf-8"))
# Marian's options, our fields, and Marian's values, of which the first is the default, with ours.
_CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer-ffn-activation": ("activation_function", {"swish": "silu", "relu": "relu", "gelu": "gelu"}),
    # n normalizes, a adds the input.
    "transformer-preprocess": ("norm_position", {"": "post", "n": "pre"}),
    "transformer-postprocess": ("norm_position", {"an": "post", "a": "pre"}),
    "transformer-postprocess-emb": ("embedding_norm", {"": False, "n": True}),
    "transformer-postprocess-top": ("final_norm", {"": False, "n": True}),
    "transformer-decoder-autoreg": ("decoder_self_attention", {"self-attention": "attention", "rnn": "ssru"}),
}
_TIES = ("tied-embeddings", "tied-embeddings-src", "tied-embeddings-all")
_KNOWN = {*_FIXED_OPTIONS, *_OTHER_NETWORKS, *_CHOICES, *_SIZES.values(), *_TIES, "version", "dim-vocabs", "dec-cell"}
_KNOWN |= {"transformer-decoder-dim-ffn", "transformer-tied-layers", "transformer-depth-scaling", "factors-combine"}
_PARTS = {"self_attn": "self", "cross_attn": "context", "mlp": "ffn"}
_PARTS_OF_SUBLAYERS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "up_proj": "1", "down_proj": "2"}
_PARTS_OF_SUBLAYERS |= {"input_proj": "", "forget_proj": "f"}
# Marian starts the decoder with zeros. Ours starts with padding, whose row holds zeros. In a model of Marian, this row follows
# the others, and its bias keeps it out of every target.
_PADDING_BIAS = -1e4
_WITH_PADDING = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)


def _read_config(options: Mapping[str, Any], num_tokens: int, eos_token_id: int) -> MetaphraseConfig:
    """Return the configuration of a network by Marian's options. `num_tokens` is the size of each vocabulary, without padding."""
    for name, value in options.items():
        if value and name not in _KNOWN:
            _refuse(name, "off", value)
    for name, allowed in _FIXED_OPTIONS.items():
        if options.get(name, allowed[0]) not in allowed:
            _refuse(name, " or ".join(map(repr, allowed)), options[name])
    fields = {field: options.get(name) for field, name in _SIZES.items()}
    fields["decoder_ffn_dim"] = options.get("transformer-decoder-dim-ffn") or fields["encoder_ffn_dim"]
    for name, value in zip((*_SIZES.values(), "transformer-decoder-dim-ffn"), fields.values(), strict=True):
        if type(value) is not int or value < 1:
            _refuse(name, "a number above 0", value)
    for name, (field, choices) in _CHOICES.items():
        value = options.get(name, next(iter(choices)))
        # d is dropout.
        letters = value.replace("d", "") if isinstance(value, str) and "process" in name else value
        ours = choices.get(letters) if isinstance(letters, str) else None
        # Two options decide on the norms.
        if ours is None or fields.setdefault(field, ours) != ours:
            _refuse(name, " or ".join(map(repr, choices)), value)
    # Options without a version were written here.
    number = re.match(r"v(\d+)\.(\d+)\.?(\d*)", str(options.get("version", "v1.12.42")))
    version = [int(part or 0) for part in number.groups()] if number else []
    if fields["activation_function"] == "gelu" and version <= [1, 12, 0]:
        # Older versions approximated it by a sigmoid.
        fields["activation_function"] = "quick_gelu"
    if fields["norm_position"] == "pre" and (fields["decoder_self_attention"] != SSRU or version < [1, 12]):
        logger.warning("With `transformer-preprocess: n`, Marian's decoder may skip norms: see docs/conversion.md.")
    if fields["decoder_self_attention"] == SSRU and options.get("dec-cell") != SSRU:
        _refuse("dec-cell", SSRU, options.get("dec-cell"))
    tied, tied_src, tied_all = (bool(options.get(name)) for name in _TIES)
    return MetaphraseConfig(
        **_FIXED_FIELDS,
        **fields,
        decoder_attention_heads=fields["encoder_attention_heads"],
        share_embeddings=tied_all or tied_src,
        tie_word_embeddings=tied_all or tied,
        vocab_size=num_tokens + 1,
        pad_token_id=num_tokens,
        eos_token_id=eos_token_id,
        decoder_start_token_id=num_tokens,
        dtype="float32",
    )


def _refuse(name: str, expected: str, value: Any) -> None:
    raise MetaphraseError(f"`{name}` in special:model.yml must be {expected}, got {reprlib.repr(value)}.")


def _write_options(config: MetaphraseConfig) -> dict[str, Any]:
    """Return Marian's options of a model. A `MetaphraseError` names all options that Marian lacks."""
    sizes = [size - 1 for size in (config.vocab_size, config.decoder_vocab_size)]
    options = {name: allowed[0] for name, allowed in _FIXED_OPTIONS.items()} | _OTHER_NETWORKS
    for name, (field, choices) in _CHOICES.items():
        theirs = {ours: theirs for theirs, ours in choices.items()}
        # A value without a counterpart becomes the default, and is an obstacle below.
        options[name] = theirs.get(getattr(config, field), next(iter(choices)))
    options |= {name: getattr(config, field) for field, name in _SIZES.items()}
    options |= {
        "dec-cell": SSRU if config.decoder_self_attention == SSRU else "gru",
        "dim-vocabs": sizes,
        "tied-embeddings": config.tie_word_embeddings and not config.share_embeddings,
        "tied-embeddings-src": config.share_embeddings and not config.tie_word_embeddings,
        "tied-embeddings-all": config.share_embeddings and config.tie_word_embeddings,
        "transformer-decoder-dim-ffn": config.decoder_ffn_dim,
        "transformer-tied-layers": [],
    }
    # For dropout in training, Marian's usual spelling.
    options["transformer-postprocess"] = f"d{options['transformer-postprocess']}"
    expected = _read_config(options, sizes[0], config.eos_token_id).to_dict()
    # Padding may stand elsewhere, since Marian has none.
    expected |= dict.fromkeys(("pad_token_id", "decoder_start_token_id"), config.pad_token_id or 0)
    expected |= {"decoder_vocab_size": config.decoder_vocab_size, "bos_token_id": config.bos_token_id}
    fields = [name for name in MetaphraseConfig.__annotations__ if name not in _FREE_FIELDS]
    allowed = {name: (expected[name],) for name in fields}
    family.refuse_obstacles(config, allowed, "none of Marian's", " Train one with `preset: student-marian`.")
    return options


def _marian_name(name: str, config: MetaphraseConfig, decoder_layers: Sequence[int]) -> str:
    """Return the name of the weight of Marian that holds one of ours.

    `decoder_layers` has the number of Marian's layer for each of our decoder layers. Tied layers share a number.
    """
    if name in (HEAD, HEAD_BIAS):
        return "decoder_ff_logit_out_" + ("Wt" if name == HEAD else "b")
    _, stack, *parts, kind = name.split(".")
    if parts == ["embed_tokens"]:
        return "Wemb" if config.share_embeddings else f"{stack}_Wemb"
    norm = {"weight": "ln_scale", "bias": "ln_bias"}[kind]
    if len(parts) == 1:
        return f"{stack}_emb_{norm}_pre" if parts == ["embedding_norm"] else f"{stack}_top_{norm}"
    _, index, sublayer, *rest = parts
    layer = f"{stack}_l{decoder_layers[int(index)] if stack == 'decoder' else int(index) + 1}"
    part = _PARTS[sublayer.removesuffix("_norm")]
    if part == "self" and stack == "decoder" and config.decoder_self_attention == SSRU:
        part = "rnn"
    if rest:
        return f"{layer}_{part}_{'W' if kind == 'weight' else 'b'}{_PARTS_OF_SUBLAYERS[rest[0]]}"
    # A norm in front has a suffix. Each has the prefix of its sublayer, but for the norm in front of a recurrence.
    is_pre_norm = config.norm_position == "pre"
    prefix = {"ffn": "_ffn", "rnn": "" if is_pre_norm else "_ffn"}.get(part, "_Wo")
    return f"{layer}_{part}{prefix}_{norm}{'_pre' if is_pre_norm else ''}"


def _to_ours(name: str, weight: np.ndarray, theirs: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return our weight `name`, which must have a shape, from the weight `theirs` of Marian."""
    if name in _WITH_PADDING:
        ours = np.concatenate((weight, np.zeros_like(weight[:1])))
    elif name == HEAD_BIAS:
        ours = np.append(weight[0], np.float32(_PADDING_BIAS))
    else:
        ours = weight.T if len(shape) > 1 else weight[0]
    checkpoints.check_shape(theirs, ours.shape, shape)
    return torch.from_numpy(np.array(ours, dtype=np.float32))


def _to_marian(name: str, weight: torch.Tensor, padding: int) -> np.ndarray:
    """Return Marian's weight from our weight `name`, without the row of padding."""
    ours = weight.float().numpy()
    if name in (ENCODER_EMBEDDING, DECODER_EMBEDDING) and ours[padding].any():
        raise MetaphraseError(f"Row {padding} of `{name}`, that of padding, must hold zeros: so Marian starts.")
    if name in (*_WITH_PADDING, HEAD_BIAS):
        ours = np.delete(ours, padding, 0)
    return ours[None] if ours.ndim == 1 else ours if name in _WITH_PADDING else np.ascontiguousarray(ours.T)


def read_marian(file: Path, output: Path, max_shard_size: int | str) -> None:
    """Write our checkpoint of a model file of Marian, with the vocabularies and the shortlist beside it."""
    tokenizers = read_vocabularies(file.parent)
    options, weights = read_model_file(file)
    config = _read_config(options, tokenizers.target.pad_token_id, tokenizers.target.eos_token_id)
    decoder_layers = options.get("transformer-tied-layers") or range(1, config.decoder_layers + 1)
    if isinstance(decoder_layers, int | str) or len(decoder_layers) != config.decoder_layers:
        _refuse("transformer-tied-layers", f"{config.decoder_layers} layers", decoder_layers)
    model = checkpoints.skeleton(MetaphraseForConditionalGeneration, config)
    our_shapes = checkpoints.shapes(model)
    names = {name: _marian_name(name, config, decoder_layers) for name in checkpoints.stored_names(model)}
    checkpoints.check_names(names.values(), weights, {*names.values()})
    planned = {}
    for name, theirs in names.items():
        weight = weights[theirs]
        make = functools.partial(_to_ours, name, weight, theirs, our_shapes[name])
        planned[name] = PlannedTensor(weight.nbytes, make)
    # Marian writes no unknown token, and has the limit of 512 tokens in models of OPUS-MT.
    ids = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    generation = GenerationConfig(**ids, max_length=512, suppress_tokens=[tokenizers.target.unk_token_id])
    checkpoints.write_ours(output, model, planned, generation, max_shard_size)
    tokenizers.save_pretrained(output)
    shortlists = sorted(file.parent.glob("lex*.bin"))
    if len(shortlists) == 1:
        _read_vocabulary_map(shortlists[0], tokenizers).save(output / VOCABULARY_MAP_NAME, tokenizers)
    elif shortlists:
        names = [path.name for path in shortlists]
        logger.warning("The shortlists are left behind: there must be one, got %s.", listed(names))


def write_marian(folder: Path, output: Path) -> None:
    """Write `model.npz` of a folder with our checkpoint, its vocabularies, and `config.yml`, with which Marian starts."""
    config = MetaphraseConfig.from_pretrained(folder)
    text = yaml.safe_dump(_write_options(config), sort_keys=True).encode() + b"\0"
    arrays = {OPTIONS_NAME: np.frombuffer(text, np.int8)}
    with contextlib.ExitStack() as files:
        weights = WeightFiles(folder, files)
        for name in checkpoints.stored_names(checkpoints.our_skeleton(folder, weights)):
            theirs = _marian_name(name, config, range(1, config.decoder_layers + 1))
            arrays[theirs] = _to_marian(name, weights.read(name), config.pad_token_id)
    np.savez(output / "model.npz", **arrays)
    generation = read_fields(folder / GENERATION_CONFIG_NAME) or {}
    settings = {"relative-paths": True, "models": ["model.npz"], "vocabs": _write_vocabularies(folder, output)}
    # Marian divides the score by length to the power `normalize`.
    settings |= {"beam-size": generation.get("num_beams") or 1, "normalize": generation.get("length_penalty", 1.0)}
    (output / "config.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _write_vocabularies(folder: Path, output: Path) -> list[str]:
    """Write the vocabularies of a folder, unless it holds *.spm. Return the names of the files of source and target."""
    if paths := sorted(folder.glob("*.spm"), key=lambda path: bool(re.search("trg|target", path.name))):
        return [paths[0].name, paths[-1].name]
    tokenizers = TokenizerPair.from_pretrained(folder)
    names = ["vocab.spm"] * 2 if tokenizers.is_joint else ["source.spm", "target.spm"]
    for name, tokenizer in zip(names, (tokenizers.source, tokenizers.target), strict=True):
        if content := sentencepiece_model(tokenizer, omit_padding=True):
            (output / name).write_bytes(content)
        else:
            logger.warning("%s is left out: add Marian's file, or train with `tokenizer_kind: unigram`.", name)
    return names


def split_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizers of source and target, or the same one twice. Neither can be saved for both."""
    name = type(tokenizer).__name__
    if name == "FSMTTokenizer":
        # Its end of sequence is called a separator.
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
        vocabularies = tokenizer.encoder, {token: index for index, token in tokenizer.decoder.items()}
    elif tokenizer.separate_vocabs:
        vocabularies = tokenizer.encoder, tokenizer.target_encoder
    else:
        return [tokenizer, tokenizer]
    special = tokenizer.all_special_tokens
    if [vocabularies[0].get(token) for token in special] != [vocabularies[1].get(token) for token in special]:
        # A model has one id of each special token. Marian's tokenizer itself also encodes targets.
        if name == "MarianTokenizer":
            return [tokenizer, tokenizer]
        raise MetaphraseError(f"Special tokens must have the same ids in both vocabularies of a {name}, got {special}.")
    sides = []
    for index, vocabulary in enumerate(vocabularies):
        side = copy.copy(tokenizer)
        side.encoder, side.decoder = dict(vocabulary), {index: token for token, index in vocabulary.items()}
        if name == "FSMTTokenizer":
            # The language decides how words are split and joined.
            side.src_lang = side.tgt_lang = (tokenizer.src_lang, tokenizer.tgt_lang)[index]
            side.init_kwargs = tokenizer.init_kwargs | {"langs": [side.src_lang] * 2}
        else:
            side.init_kwargs = tokenizer.init_kwargs | {"separate_vocabs": False}
            side.separate_vocabs, side.current_encoder = False, side.encoder
            side.spm_source = side.spm_target = side.current_spm = (tokenizer.spm_source, tokenizer.spm_target)[index]
            side.spm_files = [tokenizer.spm_files[index]] * 2
        # The copy still has the cached vocabulary.
        side._update_total_vocab_size()
        sides.append(side)
    return sides
