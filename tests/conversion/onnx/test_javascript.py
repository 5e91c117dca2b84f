"""Tests of exported folders in Node, by transformers.js: texts are those of torch."""

import json
import re
import shutil

import pytest
from node_packages import node_modules, run_node
from source_files import ROOT
from tiny_generator import PIECES, SOURCES, TARGETS, save_generator, tiny_generator
from tiny_models import DESIGNS, tiny_model

from metaphrase.conversion.onnx import export
from metaphrase.conversion.onnx.export import export_web
from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair, train_tokenizer

pytestmark = pytest.mark.slow

HOSTILE = ["</s> a cat <pad>", "<img src=x onerror=alert(1)>", "\u202e cat", "a" * 200]
HOSTILE += ["\x00 a", "\u20dd😀👨‍👩‍👧", "中文 字"]
HOSTILE += ["", " ", "  a  cat ", "a\tcat\n", "é e\u0301 ß ﬁ Ⅳ", "x<unk>y", "‏עברית", "A CAT, the-dog's 12.5!"]
TEXTS = [*SOURCES, *TARGETS, *HOSTILE]

TRANSLATE = """
import fs from "node:fs";
import * as library from "@huggingface/transformers";
import { load } from "./model/metaphrase.mjs";

const { texts, options, dtype } = JSON.parse(fs.readFileSync(0));
const model = await load(library, "./model", { dtype });
const results = [];
for (const text of texts) {
  const result = await model.translate(text, options).catch((error) => ({ error: error.message }));
  results.push(result.error ?? { ...result, map: model.align(result) });
}
console.log(JSON.stringify(results));
"""


def translate(folder, texts, dtype="fp32", **options):
    return json.loads(run_node(folder, TRANSLATE, {"texts": texts, "options": options, "dtype": dtype}))


def write(generator, folder):
    node_modules()
    export_web(save_generator(generator, folder / "source"), folder / "model")
    return folder


SEARCHES = [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 4, "early_stopping": True}]
SEARCHES += [{"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"}]
SEARCHES += [{"num_beams": 2, "length_penalty": -1.0}, {"num_beams": 1, "repetition_penalty": 1.5}]
SEARCHES += [{"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never", "max_new_tokens": 20}]
SEARCHES += [{"num_beams": 3, "no_repeat_ngram_size": 2, "min_length": 5}]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A generator with two tokenizers, and the folder above its export."""
    generator = tiny_generator(joint=False, layers=1)
    return generator, write(generator, tmp_path_factory.mktemp("node"))


@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_each_search_writes_the_texts_of_torch(exported, options):
    generator, folder = exported
    expected = generator.generate(TEXTS, **options)
    assert [result["text"] for result in translate(folder, TEXTS, **options)] == expected
    assert len({*expected}) > 5


@pytest.mark.parametrize("name", ["rotary", "relative", "relative_per_layer", "sinusoidal", "learned", "alibi", "none"])
def test_designs(name, tmp_path):
    """Among these are norms before and behind a sublayer, grouped heads, and untied projections."""
    pair = tiny_generator(joint=False).tokenizers
    fields = DESIGNS[name] | {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 320}
    fields |= pair.config_fields() | {"share_embeddings": False, "decoder_max_position_embeddings": None}
    model = tiny_model(**fields)
    model.generation_config.max_new_tokens = 12
    generator = Generator(model, pair)
    write(generator, tmp_path)
    for num_beams in (1, 4):
        found = [result["text"] for result in translate(tmp_path, TEXTS, num_beams=num_beams)]
        assert found == generator.generate(TEXTS, num_beams=num_beams)


ENCODE = """
import fs from "node:fs";
import * as library from "@huggingface/transformers";
import { TextModel } from "./metaphrase.mjs";

const { texts, ids } = JSON.parse(fs.readFileSync(0));
const tokenizer = await library.AutoTokenizer.from_pretrained("./tokenizer");
const { reader } = new TextModel(library, { config: {}, _prepare_generation_config: () => ({}) }, tokenizer, tokenizer);
const encoded = texts.map((text) => reader(text, { return_tensor: false }).input_ids);
console.log(JSON.stringify([encoded, ids.map((row) => tokenizer.decode(row, { skip_special_tokens: true }))]));
"""


@pytest.mark.parametrize("normalization", [None, "nfkc", "nfd"])
@pytest.mark.parametrize("kind", ["byte_bpe", "byte", "bpe", "unigram", "char", "word", "pretokenized"])
def test_tokenizers_of_each_kind_read_and_write_alike(kind, normalization, tmp_path):
    node_modules()
    sizes = {"byte_bpe": 350, "bpe": 60, "unigram": 60}
    texts = (PIECES if kind == "pretokenized" else SOURCES + TARGETS) * 3
    options = {"vocab_size": sizes.get(kind), "normalization": normalization, "lowercase": normalization == "nfkc"}
    tokenizer = train_tokenizer(texts, kind=kind, show_progress=False, **options)
    TokenizerPair(tokenizer, tokenizer).save_pretrained(tmp_path / "tokenizer")
    export.rewrite_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    (tmp_path / "metaphrase.mjs").write_bytes((export._PAGE / "metaphrase.mjs").read_bytes())
    # transformers.js joins neighbouring unknown characters across a split inside of a control token.
    texts = [text for text in TEXTS if "<" not in text or kind not in ("bpe", "unigram")]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    encoded, decoded = json.loads(run_node(tmp_path, ENCODE, {"texts": texts, "ids": ids}))
    assert encoded == ids
    assert decoded == [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


PIPELINE = """
import fs from "node:fs";
import { pipeline } from "@huggingface/transformers";

const { task, texts } = JSON.parse(fs.readFileSync(0));
const translator = await pipeline(task, "./model", { dtype: "fp32" });
const results = [];
for (const text of texts) results.push(Object.values((await translator(text, { max_new_tokens: 8 }))[0])[0]);
console.log(JSON.stringify(results));
"""


@pytest.mark.parametrize("task", ["translation", "text2text-generation"])
def test_pipeline_of_transformers_js_writes_greedy_texts(task, tmp_path):
    generator = tiny_generator(layers=1)
    write(generator, tmp_path)
    expected = generator.generate(SOURCES, num_beams=1)
    assert json.loads(run_node(tmp_path, PIPELINE, {"task": task, "texts": SOURCES})) == expected


def test_words_have_weights_of_the_attention(exported):
    _, folder = exported
    for result in translate(folder, SOURCES, num_beams=4):
        map = result["map"]
        assert map["targetText"] == result["text"]
        words = [word["text"] for word in map["sourceWords"]]
        assert words == map["sourceText"].split() or "".join(words) == map["sourceText"]
        assert all(map["sourceText"][word["start"] : word["end"]] == word["text"] for word in map["sourceWords"])
        for weights in map["weights"]:
            # The rest is on spaces and on the end of sequence.
            assert len(weights) == len(words) and 0 < sum(weights) <= 1.001


def test_a_text_that_is_too_long_is_an_error(exported):
    _, folder = exported
    limit = 256
    found = translate(folder, ["a" * (limit - 1), "a" * limit], num_beams=1)
    assert isinstance(found[0], dict)
    assert found[1] == f"The text has {limit + 1} tokens. The model reads at most {limit}."


REFUSE = """
import * as library from "@huggingface/transformers";
import { load } from "./model/metaphrase.mjs";

const model = await load(library, "./model", { dtype: "fp32" });
const refused = [{ max_new_tokens: 0 }, { num_beams: NaN }, { num_beams: 1e9 }, { num_beams: 1.5 }, { num_beams: "4" }];
refused.push({ length_penalty: Infinity }, { early_stopping: "soon" }, { do_sample: true }, { top_p: 0.9 }, { toString: 1 });
for (const options of refused) console.log(await model.translate("a cat", options).catch((error) => error.message));
const options = { do_sample: false, num_beams: null, suppress_tokens: [3], repetition_penalty: 1.5 };
console.log((await model.translate("a cat", options)).text);
"""


def test_options_that_python_refuses_are_refused(exported):
    generator, folder = exported
    *lines, text = run_node(folder, REFUSE).rstrip("\n").split("\n")
    assert lines[0] == "`max_new_tokens` must be a whole number from 1 to 1048576, got 0."
    assert lines[1:5] == [
        f"`num_beams` must be a whole number from 1 to 10000, got {value}." for value in ("NaN", 10**9, 1.5, 4)
    ]
    assert lines[5:8] == [
        "`length_penalty` must be a number from -10 to 10, got Infinity.",
        "`early_stopping` must be true, false, never, got soon.",
        "`do_sample` must be false, got true.",
    ]
    rule = "must be an option of greedy search or beam search, got"
    assert lines[8:] == [f"`top_p` {rule} 0.9.", f"`toString` {rule} 1."]
    assert [text] == generator.generate(["a cat"], suppress_tokens=[3], repetition_penalty=1.5)


def test_code_of_the_documentation_runs(exported, tmp_path):
    _, folder = exported
    code = re.search(r"```js\n(.*?)```", (ROOT / "docs" / "web.md").read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    shutil.copytree(folder / "model", tmp_path / "runs" / "demo-web")
    # The words of its sentences are unknown to the tiny model.
    code = code.replace("The cat is black.", "the cat").replace("The dog sleeps.", "a dog")
    lines = run_node(tmp_path, code).splitlines()
    expected = [result["text"] for result in translate(folder, ["the cat", "a dog"], dtype="q8", num_beams=4)]
    assert all(any(line.startswith(text) for line in lines) for text in expected)
