"""Tests of the exports to CTranslate2 and Argos Translate: they compute what ours does, or are refused by name."""

import json
import os
import random
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("ctranslate2")

import ctranslate2
import torch
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForSeq2SeqLM

from metaphrase.conversion.checkpoints import SINUSOIDAL_POSITIONS
from metaphrase.conversion.ctranslate2 import export_argos, export_ctranslate2, find_obstacles, make_spec
from metaphrase.conversion.marian import sentencepiece_model
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.engines.ctranslate2_engine import CTranslate2Engine
from metaphrase.inference import Generator, decode
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import STACKS
from metaphrase.tokenization import TokenizerPair

GREEDY = {"num_beams": 1}
# One of four: among the worse ones there are ties, as between texts that repeat a token and differ in where they do not.
BEAMS = {"num_beams": 4, "early_stopping": True}

_ROTATIONS = [
    None,
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
]
_FLAG = (True, False)
_CHOICES = {
    "position_embedding_type": ["sinusoidal", "learned", "relative", "rotary", "alibi", "none"],
    "sinusoidal_layout": ["interleaved", "half_split", "fairseq"],
    "position_offset": [0, 2],
    "rope_parameters": _ROTATIONS,
    "relative_attention_shared": _FLAG,
    "norm_type": ["layernorm", "rmsnorm"],
    "norm_position": ["pre", "post"],
    "norm_eps": [1e-6, 1e-2],
    "embedding_norm": _FLAG,
    "final_norm": [None, True, False],
    "scale_embedding": _FLAG,
    "attention_scale": [None, 1.0, 0.1],
    **dict.fromkeys(("attention_bias", "mlp_bias", "logits_bias"), _FLAG),
    "logits_scale": [1.0, 0.3],
    **dict.fromkeys(("tie_word_embeddings", "gated_mlp"), _FLAG),
    "activation_function": ["relu", "gelu", "gelu_new", "quick_gelu", "silu", "tanh", "relu2", "mish"],
    **{f"{stack}_layers": [1, 2, 3] for stack in STACKS},
    **{f"{stack}_attention_heads": [1, 2, 4] for stack in STACKS},
    "num_key_value_heads": [None, 1, 2],
    "head_dim": [None, 6, 16],
    "hidden_size": [32, 40],
}


def draw_configurations(count: int, seed: int) -> list[dict]:
    """Fields of so many configurations that CTranslate2 can express, drawn at random: no choice is left out by hand."""
    draw, drawn = random.Random(seed), []
    while len(drawn) < count:
        fields = {name: draw.choice(values) for name, values in _CHOICES.items()}
        is_joint = draw.choice([True, False])
        try:
            config = tiny_config(**fields)
        except ValueError:
            continue
        if not find_obstacles(config):
            drawn.append(fields | {"is_joint": is_joint, "seed": draw.randrange(1000)})
    return drawn


DRAWN = draw_configurations(12, seed=19)


def saved(folder, *, is_joint=True, seed=0, spare_rows=3, **fields):
    """A generator with a model of these fields, and where it is saved. Its embeddings have rows that are no token."""
    pair = tiny_pair(is_joint)
    own = pair.config_fields()
    own["vocab_size"] += spare_rows
    if not is_joint:
        own["decoder_vocab_size"] += spare_rows
    model = tiny_model(seed=seed, **({"share_embeddings": is_joint} | own | fields))
    model.generation_config.max_new_tokens = 12
    return Generator(model, pair), save_generator(Generator(model, pair), folder)


def exported(folder, **fields):
    """The model of `saved`, and an engine of its export."""
    generator, source = saved(folder / "model", **fields)
    export_ctranslate2(source, folder / "exported")
    return generator.model, CTranslate2Engine(folder / "exported", device="cpu")


def random_sources(size, seed=0, lengths=(3, 17, 9, 1, 6, 25)):
    """Ids of sources of different lengths, each with its end."""
    draw = random.Random(seed)
    return [[draw.randrange(4, size) for _ in range(length)] + [2] for length in lengths]


def assert_same(results, expected, tolerance=2e-3):
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    assert [[h.is_finished for h in row] for row in results] == [[h.is_finished for h in row] for row in expected]
    scores, theirs = ([h.score for row in rows for h in row] for rows in (expected, results))
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(scores), rtol=1e-4, atol=tolerance)


def assert_engine_is_torch(model, engine):
    """Tokens and scores, greedily and by beams, alone and in one batch."""
    sources = random_sources(model.config.vocab_size)
    for options in (BEAMS, BEAMS | {"early_stopping": "never", "length_penalty": 0.6}, GREEDY):
        expected = decode(model, sources, return_scores=True, **options)
        assert_same(decode(engine, sources, return_scores=True, **options), expected)
        assert_same(decode(engine, sources, return_scores=True, batch_size=1, **options), expected)
    # An output that is the same whatever is read would prove nothing.
    assert len({tuple(row[0].ids) for row in expected}) > 1
    assert len({round(row[0].score, 2) for row in expected}) >= len(sources) // 2


@pytest.mark.parametrize("fields", DRAWN, ids=range(len(DRAWN)))
def test_drawn_configurations_give_the_same_tokens(fields, tmp_path):
    model, engine = exported(tmp_path, **fields)
    assert engine.translator.compute_type == "float32"
    assert_engine_is_torch(model, engine)


def test_the_draw_reaches_every_choice():
    for name, values in _CHOICES.items():
        left = {str(value) for value in values} - {str(fields[name]) for fields in DRAWN}
        # CTranslate2 refuses these in every model.
        assert left <= {"alibi", "none", "relu2", "mish", str(_ROTATIONS[2])}, (name, left)


@pytest.mark.parametrize("buckets,distance", [(32, 128), (8, 10)])
def test_relative_positions_of_long_sources(buckets, distance, tmp_path):
    fields = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance}
    model, engine = exported(tmp_path, position_embedding_type="relative", **fields)
    sources = random_sources(model.config.vocab_size, lengths=(300, 200, 77))
    options = {"max_new_tokens": 150, "min_new_tokens": 150}
    assert decode(engine, sources, **options) == decode(model, sources, **options)


@pytest.mark.parametrize("options", [{}, {"share_embeddings": False}, {"decoder_start_token_id": 0}])
def test_special_ids_and_spare_rows(options, tmp_path):
    """One tokenizer for two embeddings; and a decoder that starts with padding."""
    model, engine = exported(tmp_path, **options)
    assert_engine_is_torch(model, engine)
    start = tiny_pair().target.convert_ids_to_tokens(model.config.decoder_start_token_id)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["decoder_start_token"] == start


def test_sinusoids_go_on_where_the_models_first_table_ends(tmp_path):
    model, engine = exported(tmp_path, position_embedding_type="sinusoidal", max_position_embeddings=4)
    assert_engine_is_torch(model, engine)
    assert make_spec(model).encoder.position_encodings.encodings.shape[0] == SINUSOIDAL_POSITIONS


def test_a_source_beyond_the_table_of_positions_is_refused(tmp_path):
    _, engine = exported(tmp_path, position_embedding_type="learned", max_position_embeddings=16)
    assert decode(engine, [[5] * 16])
    with pytest.raises(RuntimeError, match=r"position encodings .* 16"):
        decode(engine, [[5], [6] * 16, [5] * 17, [7] * 3], max_new_tokens=4)


REFUSED = {
    "'linear'": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "0.5": {"head_dim": 6, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "'relu2'": {"activation_function": "relu2"},
    "`norm_position` 'both'": {"norm_position": "both"},
    "`encoder_layer_types`": {"encoder_layer_types": ["sliding_attention"] * 2, "encoder_window": [1, 1]},
    "`attn_logit_softcapping`": {"attn_logit_softcapping": 2.0},
    "`decoder_self_attention`": {"decoder_self_attention": "ssru"},
}


@pytest.mark.parametrize("value", REFUSED)
def test_what_cannot_be_expressed_is_an_obstacle(value):
    [obstacle] = find_obstacles(tiny_config(**REFUSED[value]))
    assert value in obstacle


def test_all_options_in_the_way_are_named(tmp_path):
    fields = {"position_embedding_type": "alibi", "qk_norm": True, "activation_function": "mish"}
    _, folder = saved(tmp_path / "model", **fields)
    with pytest.raises(ValueError, match="ctranslate2 cannot express") as refusal:
        export_ctranslate2(folder, tmp_path / "exported")
    assert all(f"`{name}`" in str(refusal.value) for name in fields) and not (tmp_path / "exported").exists()


def test_every_preset_without_windows_can_be_expressed():
    presets = {name: MetaphraseConfig.from_preset(name) for name in MetaphraseConfig.presets()}
    assert [name for name, config in presets.items() if find_obstacles(config)] == [
        "metaphrase-long",
        "student-ssru",
        "student-marian",
    ]


@pytest.mark.parametrize("ends", [[2, 3], None])
def test_anything_but_one_end_is_refused(ends, tmp_path):
    generator, _ = saved(tmp_path / "model")
    generator.model.config.eos_token_id = generator.model.generation_config.eos_token_id = ends
    folder = save_generator(generator, tmp_path / "changed")
    with pytest.raises(ValueError, match=r"`eos_token_id` \[.*\]: it knows exactly one"):
        export_ctranslate2(folder, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saved generators, by whether they have one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {joint: save_generator(tiny_generator(joint), folder / str(joint)) for joint in (True, False)}


@pytest.mark.parametrize("is_joint", [True, False])
def test_export_by_command_line(is_joint, models, tmp_path):
    output = tmp_path / "exported"
    execute("export", [str(models[is_joint]), str(output), "--format", "ctranslate2"])
    names = {"shared_vocabulary.json"} if is_joint else {"source_vocabulary.json", "target_vocabulary.json"}
    assert names | {"model.bin", "config.json", "export.json", "generation_config.json"} <= {
        path.name for path in output.iterdir()
    }
    generator = Generator.from_pretrained(output, engine="ctranslate2", device="cpu")
    assert generator.generate(SOURCES) == tiny_generator(is_joint).generate(SOURCES)


@pytest.mark.parametrize("quantization", ["int8", "int8_float32", "float16"])
def test_quantization(quantization, models, tmp_path):
    whole = export_ctranslate2(models[True], tmp_path / "whole")
    output = export_ctranslate2(models[True], tmp_path / "exported", quantization=quantization)
    ratio = (output / "model.bin").stat().st_size / (whole / "model.bin").stat().st_size
    assert 0.25 <= ratio <= 0.5 if quantization.startswith("int8") else 0.5 <= ratio <= 0.65
    assert json.loads((output / "export.json").read_text())["quantization"] == quantization
    targets = Generator.from_pretrained(output, engine="ctranslate2", device="cpu").generate(SOURCES)
    assert len(targets) == len(SOURCES) and all(targets)


def test_weights_of_lower_precision_keep_their_type(models, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(models[True], dtype=torch.bfloat16)
    generator = tiny_generator()
    generator.model = model
    folder = save_generator(generator, tmp_path / "half")
    sizes = [
        (export_ctranslate2(source, tmp_path / f"exported_{index}") / "model.bin").stat().st_size
        for index, source in enumerate((folder, models[True]))
    ]
    assert 0.5 <= sizes[0] / sizes[1] < 0.65
    # Here it computes in float32, and so must be compared with the same weights in float32.
    engine = CTranslate2Engine(tmp_path / "exported_0", device="cpu", compute_type="float32")
    assert_engine_is_torch(model.float(), engine)


CORPUS = make_demo_corpus(num_train=600, num_validation=200, num_test=20)
LANGUAGES = {"source_language": ("en", "English"), "target_language": ("de", "German")}
# A folder with the files of the package argostranslate, which is not needed for anything else.
ARGOS_PATH = os.environ.get("ARGOSTRANSLATE_PATH")


@pytest.fixture(scope="module")
def generator():
    sources, targets = zip(*CORPUS["train"], strict=True)
    pair = TokenizerPair.train(sources, targets, kind="unigram", vocab_size=400, show_progress=False)
    model = tiny_model(max_position_embeddings=256, **pair.config_fields())
    model.generation_config.max_new_tokens = 8
    return Generator(model, pair)


@pytest.fixture(scope="module")
def package(generator, tmp_path_factory):
    """The unpacked package of a model."""
    folder = tmp_path_factory.mktemp("argos")
    save_generator(generator, folder / "model")
    words = [str(folder / "model"), str(folder / "en_de.argosmodel"), "--format", "argos"]
    execute("export", [*words, "--source_lang", "EN-US", "--target_lang", "deu_Latn"])
    with zipfile.ZipFile(folder / "en_de.argosmodel") as file:
        file.extractall(folder / "packages")
    assert {path.name for path in folder.iterdir()} == {"model", "packages", "en_de.argosmodel"}
    [package] = (folder / "packages").iterdir()
    return package


def test_package_has_the_files_that_argos_reads(package):
    metadata = json.loads((package / "metadata.json").read_text(encoding="utf-8"))
    expected = {"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German", "type": "translate"}
    assert expected.items() <= metadata.items() and package.name == "translate-en_de"
    assert (package / "README.md").is_file() and (package / "model" / "model.bin").is_file()


def test_sentencepiece_splits_as_the_tokenizer(generator):
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(generator.tokenizers.source))
    texts = [text for pair in CORPUS["validation"] for text in pair]
    texts += ["", "two  spaces ", "中文 text 中", "under_score ▁ mark"]
    texts += ["naïve ﬁ", "tab\tx", "non\u00a0breaking", "😀😀"]
    expected = [ids[:-1] for ids in generator.tokenizers.encode_sources(texts)]
    assert processor.encode(texts) == expected
    tokenizer = generator.tokenizers.target
    assert processor.decode(expected[:400]) == tokenizer.batch_decode(expected[:400], skip_special_tokens=True)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_steps_of_argos_write_the_same_targets(num_beams, generator, package):
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(package / "model"))
    sources = [source for source, _ in CORPUS["validation"][:20]]
    rows = translator.translate_batch(
        processor.encode(sources, out_type=str), beam_size=num_beams, length_penalty=0.2, max_decoding_length=8
    )
    options = {"num_beams": num_beams, "early_stopping": num_beams > 1, "length_penalty": 0.2}
    targets = generator.generate(sources, **options)
    assert [processor.decode_pieces(row.hypotheses[0]) for row in rows] == targets
    assert len({*targets}) > 4


@pytest.mark.skipif(not ARGOS_PATH, reason="ARGOSTRANSLATE_PATH names no folder with the package argostranslate")
@pytest.mark.slow
def test_argos_reads_the_package(generator, package, tmp_path):
    text = CORPUS["validation"][0][0]
    code = (
        "import sys, pathlib; from argostranslate import package\n"
        "[found] = package.get_installed_packages([pathlib.Path(sys.argv[1])])\n"
        "print(found, found.from_code, found.to_code, found.type, *found.tokenizer.encode(sys.argv[2]))"
    )
    environment = os.environ | {"PYTHONPATH": ARGOS_PATH, "HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    environment |= dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", code, str(package.parent), text], env=environment, capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    pieces = generator.tokenizers.source.tokenize(text)
    assert result.stdout.split() == ["English", "→", "German", "en", "de", "translate", *pieces]


def test_what_argos_cannot_express_is_refused(generator, tmp_path):
    save_generator(tiny_generator(joint=False, kind="unigram"), tmp_path / "two")
    with pytest.raises(ValueError, match="one tokenizer of the kind unigram, not normalized, got two tokenizers"):
        export_argos(tmp_path / "two", tmp_path / "a.argosmodel", **LANGUAGES)
    save_generator(tiny_generator(), tmp_path / "model")
    (tmp_path / "b.argosmodel").touch()
    for name, languages, match in (
        ("out", {}, r"must be a file that ends in \.argosmodel"),
        ("a.argosmodel", {}, "BPE"),
        ("b.argosmodel", {}, "`output` must not exist"),
        ("c.argosmodel", {"target_language": ("../x", "X")}, r"must have two or three letters, .* got '\.\./x'"),
    ):
        with pytest.raises(ValueError, match=match):
            export_argos(tmp_path / "model", tmp_path / name, **LANGUAGES | languages)
    words = [str(tmp_path / "model"), str(tmp_path / "c.argosmodel"), "--format", "argos", "--source_lang", "en"]
    with pytest.raises(ValueError, match="`--target_lang` must be given with --format argos"):
        execute("export", words)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "two", "b.argosmodel"}
