"""Tests of trimmed vocabularies. Other tokens, logits and outputs must be those of the whole model."""

import json
import logging
import random
import shutil

import pytest
import torch
import transformers
from converted_models import TOLERANCE, fill_randomly
from subcommands import execute
from tiny_generator import tiny_pair
from tiny_languages import CODES
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from metaphrase.conversion import convert, trim_vocabulary
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.storage.folders import read_json, write_json
from metaphrase.tokenization import TokenizerPair, train_tokenizer

PAIRS = make_demo_corpus(num_train=400, num_validation=20, num_test=20)["train"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def other_language(seed=0):
    """Return sentences whose words and letters the files do not use."""
    rng = random.Random(seed)
    return [" ".join("".join(rng.choices("абвгдежз", k=rng.randint(2, 7))) for _ in range(8)) for _ in range(300)]


def train_pieces(kind, specials=SPECIAL, size=900):
    """Train the model of a tokenizer with spaces of sentencepiece, on all languages."""
    model, trainer = {
        "bpe": (models.BPE(unk_token="<unk>", fuse_unk=True), trainers.BpeTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
    }[kind]
    backend = Tokenizer(model)
    is_wordpiece = kind == "wordpiece"
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if is_wordpiece else pre_tokenizers.Metaspace()
    options = {"unk_token": "<unk>"} if kind == "unigram" else {}
    texts = [text for pair in PAIRS for text in pair] + other_language()
    trainer = trainer(vocab_size=size, special_tokens=specials, show_progress=False, **options)
    backend.train_from_iterator(texts, trainer)
    return backend


def fast(backend):
    names = {f"{name}_token": token for name, token in zip(("bos", "pad", "eos", "unk"), SPECIAL, strict=True)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def state_of(backend):
    return json.loads(backend.to_str())["model"]


def entries_of(*arguments):
    return [tuple(entry) for entry in state_of(train_pieces("unigram", *arguments))["vocab"]]


def nllb():
    state = state_of(train_pieces("bpe"))
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = transformers.NllbTokenizer(vocab=state["vocab"], merges=merges, extra_special_tokens=CODES["nllb"])
    config = transformers.M2M100Config(**SIZES, vocab_size=len(tokenizer) + 3, max_position_embeddings=128)
    return tokenizer, config


def mbart():
    tokenizer = transformers.MBartTokenizer(vocab=entries_of(), extra_special_tokens=CODES["mbart"])
    config = transformers.MBartConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=128)
    config.decoder_start_token_id = tokenizer.convert_tokens_to_ids("de_DE")
    config.task_specific_params = {"translation_en_to_de": {"decoder_start_token_id": config.decoder_start_token_id}}
    return tokenizer, config


def mt5():
    tokenizer = transformers.T5Tokenizer(vocab=entries_of(["<pad>", "</s>", "<unk>"]), extra_ids=0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return tokenizer, transformers.MT5Config(**sizes, vocab_size=len(tokenizer) + 12, decoder_start_token_id=0)


def with_bytes():
    """Unigram pieces where an unknown letter is spelled in bytes. The pieces lack some letters of the files."""
    entries = [entry for entry in entries_of() if entry[0] not in ("k", "ü")]
    entries[4:4] = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram(entries, SPECIAL.index("<unk>"), True))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast(backend), None


TOKENIZERS = {
    "nllb": nllb,
    "mbart": mbart,
    "mt5": mt5,
    "unigram with bytes": with_bytes,
    "byte_bpe": lambda: (train_tokenizer([*map(" ".join, PAIRS), *other_language()], vocab_size=900), None),
    "wordpiece": lambda: (fast(train_pieces("wordpiece")), None),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def folders(request, tmp_path_factory):
    """Folders of a whole and a trimmed model, and the texts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer, config = TOKENIZERS[request.param]()
    if config is None:
        fields = TokenizerPair(tokenizer, tokenizer).config_fields()
        model = tiny_model(**fields | {"tie_word_embeddings": False}, logits_bias=True)
    else:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        if request.param == "nllb":
            model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("deu_Latn")
    fill_randomly(model, 0)
    if "final_logits_bias" in model.state_dict():
        model.final_logits_bias.normal_()
    model.save_pretrained(folder / "whole")
    tokenizer.save_pretrained(folder / "whole")
    lines = [f"{source}\t{target}" for source, target in PAIRS[:60]]
    (folder / "pairs.tsv").write_text("\n".join(["", *lines]), encoding="utf-8")
    trim_vocabulary(folder / "whole", folder / "trimmed", [folder / "pairs.tsv"])
    if config is not None:
        convert(folder / "whole", folder / "converted")
    whole = "whole" if config is None else "converted"
    return folder / whole, folder / "trimmed", [text for pair in PAIRS[:60] for text in pair]


def load(folder):
    pair = TokenizerPair.from_pretrained(folder)
    return pair.source, MetaphraseForConditionalGeneration.from_pretrained(folder).eval()


def test_texts_keep_their_tokens(folders):
    *folders, texts = folders
    whole, trimmed = (TokenizerPair.from_pretrained(folder) for folder in folders)
    for name in ("encode_sources", "encode_targets"):
        given, expected = (
            [pair.source.convert_ids_to_tokens(row) for row in getattr(pair, name)(texts)] for pair in (trimmed, whole)
        )
        assert given == expected
    assert trimmed.decode_targets(trimmed.encode_targets(texts)) == whole.decode_targets(whole.encode_targets(texts))
    sizes = [len(pair.source) for pair in (whole, trimmed)]
    assert sizes[1] < 0.9 * sizes[0]
    assert not any("д" in token for token in trimmed.source.get_vocab())


def test_new_texts_of_the_same_letters_have_no_unknown_token(folders):
    whole, trimmed = (TokenizerPair.from_pretrained(folder).source for folder in folders[:2])
    letters = sorted(set("".join(folders[2])) - {" "})
    texts = ["".join(letters[start::3]) for start in range(3)] + [text[::-1] for text in folders[2]]
    before, after = (
        [ids.count(tokenizer.unk_token_id) for ids in tokenizer(texts).input_ids] for tokenizer in (whole, trimmed)
    )
    assert before == after


@torch.no_grad()
def test_logits_and_outputs_are_those_of_the_whole_model(folders):
    (whole, model), (trimmed, small) = map(load, folders[:2])
    vocabulary, names = whole.get_vocab(), sorted(trimmed.get_vocab(), key=trimmed.get_vocab().get)
    ids = torch.tensor([vocabulary[name] for name in names])
    assert small.config.vocab_size == small.config.decoder_vocab_size == len(ids) == len(trimmed)
    options = {"return_tensors": "pt", "padding": True}
    inputs, their_inputs = (tokenizer(folders[2][:8], **options) for tokenizer in (trimmed, whole))
    for batch in (inputs, their_inputs):
        batch.pop("token_type_ids", None)
    assert torch.equal(ids[inputs["input_ids"]], their_inputs["input_ids"])
    expected = model(**their_inputs, decoder_input_ids=their_inputs["input_ids"]).logits
    given = small(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    bound = TOLERANCE * expected.abs().max().item()
    torch.testing.assert_close(given, expected[..., ids], rtol=0, atol=bound)
    others = sorted({*range(model.config.vocab_size)} - {*ids.tolist()})
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 1}
    rows = small.generate(**inputs, **options)
    assert torch.equal(ids[rows], model.generate(**their_inputs, **options, suppress_tokens=others))
    # Rows differ: a model that always writes the same would show nothing.
    assert len({*map(str, rows.tolist())}) > 1


def test_ids_in_settings_stay_those_of_the_same_tokens(folders):
    whole, trimmed = (TokenizerPair.from_pretrained(folder).source for folder in folders[:2])
    for name in ("config.json", "generation_config.json"):
        before, after = (read_json(folder / name) for folder in folders[:2])
        fields = [field for field in before if field.endswith("_token_id") and before[field] is not None]
        assert fields
        for field in fields:
            expected = whole.convert_ids_to_tokens(before[field])
            assert trimmed.convert_ids_to_tokens(after[field]) == expected, field
        for task, fields in (before.get("task_specific_params") or {}).items():
            start = after["task_specific_params"][task]["decoder_start_token_id"]
            assert trimmed.convert_ids_to_tokens(start) == whole.convert_ids_to_tokens(fields["decoder_start_token_id"])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of a Metaphrase model, and a file of texts."""
    folder = tmp_path_factory.mktemp("small")
    pair = tiny_pair(kind="byte_bpe")
    tiny_model(**pair.config_fields()).save_pretrained(folder / "model")
    pair.save_pretrained(folder / "model")
    (folder / "texts").write_text("the small dog\n", encoding="utf-8")
    return folder


def test_lists_of_ids_follow_and_keep_their_tokens(small, tmp_path):
    folder = shutil.copytree(small / "model", tmp_path / "model")
    path = folder / "generation_config.json"
    vocabulary = TokenizerPair.from_pretrained(folder).source.get_vocab()
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    assert not {first, second} & {*tiny_pair(kind="byte_bpe").source.tokenize("the small dog")}
    ids = [vocabulary[first], vocabulary[second]]
    lists = {"bad_words_ids": [ids, ids[1:]], "suppress_tokens": ids, "eos_token_id": [2, ids[0]]}
    lists["sequence_bias"] = [[ids, 1.0]]
    write_json(path, read_json(path) | lists)
    trim_vocabulary(folder, tmp_path / "out", [small / "texts"])
    tokenizer, written = TokenizerPair.from_pretrained(tmp_path / "out").source, read_json(tmp_path / "out" / path.name)
    new = tokenizer.convert_tokens_to_ids([first, second])
    assert new != ids
    assert written["bad_words_ids"] == [new, new[1:]] and written["suppress_tokens"] == new
    assert written["eos_token_id"] == [2, new[0]]
    assert written["sequence_bias"] == [[new, 1.0]]


@pytest.mark.parametrize("is_template", [True, False])
def test_special_tokens_behind_others_and_unknown_letters(is_template, tmp_path):
    """Without the least probable piece, unknown letters would cost less: `abXcd` would become `ab`, `<unk>`, `cd`."""
    scores = {"<unk>": 0.0, "q": -5.0, "a": -9.0, "ab": -1.0, "bXc": -9.0, "cd": -1.0, "d": -9.0, "z": -20.0}
    names = [*scores, "<s>", "</s>", "<pad>"]
    backend = Tokenizer(models.Unigram([(name, scores.get(name, 0.0)) for name in names], 0, False))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start, end = ((name, names.index(name)) for name in names[-3:-1])
    backend.post_processor = (
        processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[start, end])
        if is_template
        else processors.BertProcessing(end, start)
    )
    tokenizer = fast(backend)
    fields = TokenizerPair(tokenizer, tokenizer).config_fields()
    tiny_model(**fields).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts").write_text("abXcd\nab cd\n", encoding="utf-8")
    trim_vocabulary(tmp_path / "model", tmp_path / "out", [tmp_path / "texts"])
    trimmed = TokenizerPair.from_pretrained(tmp_path / "out").source
    assert trimmed.convert_ids_to_tokens(range(len(trimmed))) == [name for name in names if name != "q"]
    rows = trimmed.backend_tokenizer.encode_batch(["abXcd", "ab"])
    assert [row.tokens for row in rows] == [["<s>", "a", "bXc", "d", "</s>"], ["<s>", "ab", "</s>"]]
    assert [row.ids for row in rows] == [trimmed.convert_tokens_to_ids(row.tokens) for row in rows]


def test_command_counts_tokens_and_bytes(small, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        execute("convert", [str(small / "model"), str(tmp_path / "out"), "--trim_vocabulary", str(small / "texts")])
    tokens = [len(TokenizerPair.from_pretrained(folder).source) for folder in (tmp_path / "out", small / "model")]
    sizes = [(folder / "model.safetensors").stat().st_size / 1e6 for folder in (tmp_path / "out", small / "model")]
    assert tokens[0] < tokens[1] and f"Kept {tokens[0]} of {tokens[1]} tokens." in caplog.text
    assert f"The weights have {sizes[0]:.1f} MB, {sizes[1] - sizes[0]:.1f} MB less." in caplog.text
    assert not (tmp_path / "out" / "whole").exists()
    # A second time nothing is left to cut.
    trim_vocabulary(tmp_path / "out", tmp_path / "again", [small / "texts"])
    assert len(TokenizerPair.from_pretrained(tmp_path / "again").source) == tokens[0]


def test_trimmed_nllb_goes_back(tmp_path):
    tokenizer, config = nllb()
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    (tmp_path / "texts").write_text("the dog sleeps\n", encoding="utf-8")
    trim_vocabulary(tmp_path / "whole", tmp_path / "trimmed", [tmp_path / "texts"])
    convert(tmp_path / "trimmed", tmp_path / "back", to="m2m_100")
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    assert type(back).__name__ == "M2M100ForConditionalGeneration"
    pair = TokenizerPair.from_pretrained(tmp_path / "back")
    assert back.config.vocab_size == len(pair.source) < len(tokenizer)
    assert {*CODES["nllb"]} <= {*pair.source.get_vocab()}


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_empty_texts_are_refused(content, small, tmp_path):
    (tmp_path / "texts").write_bytes(content)
    with pytest.raises(ValueError, match="`trim_vocabulary` must name files with texts, got no text in"):
        trim_vocabulary(small / "model", tmp_path / "out", [tmp_path / "texts"])
    assert not (tmp_path / "out").exists()


def test_other_bytes_and_other_families_are_refused(small, tmp_path):
    (tmp_path / "texts").write_bytes(b"dog\n\xff\n")
    with pytest.raises(ValueError, match="must be UTF-8, but line 2"):
        trim_vocabulary(small / "model", tmp_path / "out", [tmp_path / "texts"])
    words = [str(small / "model"), str(tmp_path / "out"), "--trim_vocabulary", str(small / "texts"), "--to", "t5"]
    with pytest.raises(ValueError, match="`to` must be left out with `trim_vocabulary`, got 't5'"):
        execute("convert", words)


def test_tokenizers_that_cannot_be_trimmed_are_refused(small, tmp_path):
    pytest.importorskip("sentencepiece")
    from sentencepiece_models import write_marian_tokenizer

    write_marian_tokenizer(tmp_path / "marian", ["the dog sleeps"], ["der Hund schläft"])
    write_json(tmp_path / "marian" / "config.json", {"model_type": "marian"})
    with pytest.raises(ValueError, match=r"got a MarianTokenizer, which runs in Python\. Take a model such as NLLB"):
        trim_vocabulary(tmp_path / "marian", tmp_path / "out", [small / "texts"])
    tiny_model().save_pretrained(tmp_path / "two")
    tiny_pair(joint=False).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="needs one fast tokenizer for both sides, got two tokenizers"):
        trim_vocabulary(tmp_path / "two", tmp_path / "out", [small / "texts"])
