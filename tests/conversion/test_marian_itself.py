"""Tests with Marian itself: it decodes what is written here, and what it trains is read here."""

import shutil
import subprocess
import sys

import pytest
import torch
from marian_models import NETWORKS, options_of, write_model
from sentencepiece_models import train_model
from small_experiments import train
from tiny_generator import SOURCES, TARGETS

from metaphrase.conversion import convert
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.inference import Generator

pymarian = pytest.importorskip("pymarian", reason="needs Marian itself: `pip install pymarian`, for Python 3.11")
pytestmark = pytest.mark.slow
# An option without a value is an empty text.
COMMON = {"cpu_threads": 1, "quiet": "", "workspace": 64}
TEXTS_TO_DECODE = [*SOURCES, "the small cat runs and the dog sleeps", "two  dogs", "ö"]
DEPTHS = {"post-norm": {"enc-depth": 1, "dec-depth": 4}, "ssru": {"enc-depth": 3, "dec-depth": 1}}
CASES = [(network, {}) for network in NETWORKS] + list(DEPTHS.items())
CORPUS = make_demo_corpus(1000)
SIDES = [*map(list, zip(*CORPUS["train"], strict=True))]
JOINT, TWO = {"vocab.spm": SIDES[0] + SIDES[1]}, {"source.spm": SIDES[0], "target.spm": SIDES[1]}


def start(folder, **options):
    return pymarian.Translator(config=folder / "config.yml", **COMMON | options)


def marian_scores(folder, pairs, tmp_path):
    """Return the scores of each pair's target tokens, and of its end, by marian-scorer."""
    files = [str(tmp_path / side) for side in ("sources.txt", "targets.txt")]
    for file, texts in zip(files, zip(*pairs, strict=True), strict=True):
        (tmp_path / file).write_text("\n".join(texts) + "\n", encoding="utf-8")
    words = ["-m", str(folder / "model.npz"), "-v", *[str(folder / "vocab.spm")] * 2, "-t", *files, "--word-scores"]
    command = [sys.executable, "-m", "pymarian", "score", *words, "--cpu-threads", "1", "--quiet", "-w", "64"]
    lines = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout.splitlines()
    return [line.partition("WordScores= ")[2].split() for line in lines]


def assert_marian_computes_the_same(marian_folder, our_folder, tmp_path):
    """Compare each score of Marian's greedy search with ours, and each of its tokens with our best one.

    With norms in front of attention, Marian's decoder differs from its training. Its scorer does not.
    """
    generator = Generator.from_pretrained(our_folder, engine="torch")
    pair, model = generator.tokenizers, generator.model
    is_scored = model.config.norm_position == "pre" and model.config.decoder_self_attention == "attention"
    if is_scored:
        rows = marian_scores(marian_folder, zip(SOURCES, TARGETS, strict=True), tmp_path)
        rows = [
            (text, pair.encode_targets([target])[0], row)
            for text, target, row in zip(SOURCES, TARGETS, rows, strict=True)
        ]
    else:
        marian, rows = start(marian_folder, beam_size=1, n_best="", word_scores="", no_spm_decode=""), []
        for text, line in zip(TEXTS_TO_DECODE, marian.translate(TEXTS_TO_DECODE), strict=True):
            _, pieces, scores, *_ = line.split(" ||| ")
            ids = [*pair.target.convert_tokens_to_ids(pieces.split()), pair.target.eos_token_id]
            rows.append((text, ids, scores.split()[1:]))
    for text, ids, scores in rows:
        # A target that met the limit has no end.
        ids, expected = ids[: len(scores)], torch.tensor([float(score) for score in scores])
        inputs = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
        with torch.no_grad():
            logits = model(torch.tensor(pair.encode_sources([text])), decoder_input_ids=inputs).logits[0]
        logits[:, pair.target.pad_token_id] = -torch.inf
        torch.testing.assert_close(logits.log_softmax(-1)[range(len(ids)), ids], expected, rtol=0, atol=1e-3)
        logits[:, pair.target.unk_token_id] = -torch.inf
        assert is_scored or logits.argmax(-1).tolist() == ids
    assert sum(len(scores) for *_, scores in rows) > 20


def assert_both_directions(theirs, tmp_path):
    convert(theirs / "model.npz", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="marian-npz")
    shutil.copy(tmp_path / "again" / "config.yml", theirs)
    for folder in (theirs, tmp_path / "again"):
        assert_marian_computes_the_same(folder, tmp_path / "ours", tmp_path)


@pytest.mark.parametrize(("network", "depths"), CASES)
def test_random_weights_compute_the_same(network, depths, tmp_path):
    write_model(tmp_path / "theirs", network, **depths)
    assert_both_directions(tmp_path / "theirs", tmp_path)


def train_by_marian(folder, network, vocabularies, **options):
    folder.mkdir()
    for name, texts in vocabularies.items():
        train_model(texts, folder / name, eos_id=0, unk_id=1, bos_id=-1, vocab_size=80, hard_vocab_limit=True)
    files = [folder / "train.en", folder / "train.de"]
    for file, texts in zip(files, SIDES, strict=True):
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    options = options_of(network, 80) | {"model": folder / "model.npz", "train-sets": files, "seed": 1} | options
    left_out = ("dim-vocabs", "version", "bert-type-vocab-size")
    options = {name: value for name, value in options.items() if value and name not in left_out}
    names = [*vocabularies]
    options |= {"vocabs": [folder / names[0], folder / names[-1]], "after": "50u", "mini-batch": 8, "learn-rate": 0.003}
    assert pymarian.Trainer(**options | COMMON).train() == 0


TRAINED = [(name, JOINT, {}) for name in NETWORKS] + [(name, JOINT, depths) for name, depths in DEPTHS.items()]
TRAINED += [("two-embeddings", TWO, {}), ("three-embeddings", TWO, {"dec-depth": 1})]


@pytest.mark.parametrize(("network", "vocabularies", "depths"), TRAINED)
def test_models_that_marian_trained_compute_the_same(network, vocabularies, depths, tmp_path):
    train_by_marian(tmp_path / "theirs", network, vocabularies, **depths)
    assert_both_directions(tmp_path / "theirs", tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"joint_vocabulary": True},
        {"joint_vocabulary": False, "model.decoder_self_attention": "attention", "vocab_size": 200},
        {"model.tie_word_embeddings": False, "model.decoder_layers": 2, "model.activation_function": "silu"},
        {"model_name_or_path": "ours", "learning_rate": 0.003},
    ],
)
def test_marian_decodes_what_was_trained_here(fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = CORPUS["train"]
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    if "model_name_or_path" in fields:
        train_by_marian(tmp_path / "theirs", "ssru", JOINT)
        convert(tmp_path / "theirs" / "model.npz", tmp_path / "ours")
    else:
        fields = {"tokenizer_kind": "unigram", "vocab_size": 300, "preset": "student-marian"} | fields
        fields |= {"model.hidden_size": 32, "model.dropout": 0.0}
    options = {"max_steps": 300, "learning_rate": 0.01, "warmup_steps": 50, "generation_max_length": 60}
    options |= {"eval_strategy": "no", "save_strategy": "no", "validation_file": None, "test_file": None}
    train(tmp_path, tmp_path / "run", **options | fields)
    convert(tmp_path / "run", tmp_path / "written", to="marian-npz")
    generator = Generator.from_pretrained(tmp_path / "run", engine="torch")
    sources = [source for source, _ in CORPUS["test"][:100]]
    for num_beams in (1, 4):
        options = {"num_beams": num_beams, "length_penalty": 0.6, "early_stopping": num_beams > 1}
        ours = generator.generate(sources, max_new_tokens=99, **options)
        theirs = start(tmp_path / "written", beam_size=num_beams, normalize=0.6, max_length_factor=9).translate(sources)
        # Loops end at different limits, and beams may end in another order.
        num_equal = sum(our[:50] == their[:50] for our, their in zip(ours, theirs, strict=True))
        assert num_equal >= (100 if num_beams == 1 else 95) and len({*ours}) > 20
