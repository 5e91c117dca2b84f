"""Models of Marian with random weights in its own files, and its forward pass in numpy."""

import math
import struct
from functools import partial

import numpy as np
import yaml
from sentencepiece_models import train_model
from tiny_generator import SOURCES, TARGETS

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


def options_of(network, size):
    sizes = {"dim-emb": WIDTH, "transformer-dim-ffn": FFN, "transformer-heads": HEADS, "enc-depth": 2, "dec-depth": 2}
    common = {"type": "transformer", "tied-embeddings-all": True, "dim-vocabs": [size, size], "version": "v1.12.42"}
    return sizes | common | {"transformer-dim-aan": 2048, "bert-type-vocab-size": 2} | NETWORKS[network]


def draw_weights(options):
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
    activate = (activations | {"gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2})[
        options.get("transformer-ffn-activation", "swish")
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


def write_shortlist(path, size, num_first, targets):
    offsets = np.cumsum([0, *map(len, targets)]).astype("<u8")
    ids = np.concatenate(targets).astype("<u4")
    head = struct.pack("<6Q", 0xF11A48D5013417F5, 0, num_first, 2, len(offsets), len(ids))
    path.write_bytes(head + offsets.tobytes() + ids.tobytes())
