"""The attention page: one file that needs no other, with all texts escaped and weights that can be read back."""

import base64
import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.hub_card import write_attention_page
from metaphrase.hub_card.attention_page import MAX_SENTENCES
from metaphrase.inference import cross_attentions, word_weights

EVIL = """</script><script>alert(1)</script> <b id="x">&amp; 'q' "q" <!-- {{data}} \\u003c $& \x07"""


class Page(HTMLParser):
    """What a browser would find: elements, ids, the text of words, of scripts and of the data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.words, self.scripts, self.open = [], [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.open.append(attributes.get("id") if tag == "button" else tag)
        if tag == "button":
            self.words[attributes["id"]] = ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        if self.open and self.open[-1] in self.words:
            self.words[self.open[-1]] += text
        elif self.open and self.open[-1] == "script":
            self.scripts[-1] += text


@pytest.fixture(scope="module")
def maps():
    sources = [*SOURCES[:3], EVIL]
    return cross_attentions(tiny_generator(kind="byte"), sources, [*TARGETS[:3], EVIL], keep_heads=True)


@pytest.fixture(scope="module")
def text(maps, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "new" / "page.html"
    assert write_attention_page(maps, path, title=EVIL, layer=-1, head=2) == path
    return path.read_bytes().decode("utf-8")


def assert_packed(sentence, weights):
    packed = np.frombuffer(base64.b64decode(sentence["weights"]), dtype=np.uint8)
    np.testing.assert_allclose(packed.reshape(weights.shape) / 255, weights, atol=0.002)


def run_script(program):
    """Return the JSON that a JavaScript program prints."""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_page_stands_alone(text):
    page = Page(text)
    outside = text.replace(page.scripts[0], "")
    assert "http" not in text and "//" not in re.sub(r"^// .*$", "", outside, flags=re.MULTILINE)
    assert not re.search(r"@import|url\(|\bfetch\b|XMLHttp|innerHTML|<link|<iframe|<img", text)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "style"} & attributes.keys(), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert len(page.ids) == len(set(page.ids)) and page.ids[0] and len(page.scripts) == 2
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "prefers-color-scheme: dark" in text


def test_texts_are_escaped_and_whole(maps, text):
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 2 and "alert(1)" not in "".join(page.scripts[1:])
    for index, attention in enumerate(maps):
        for side in ("source", "target"):
            words = [page.words[key] for key in page.words if key.startswith(f"sentence-{index}-{side}-")]
            assert words == [word.replace("\x07", "\\x07") for word in getattr(attention, f"{side}_words")]
    # Nothing in a text is taken for a place of the template, or ends the data.
    assert "{{data}}" in page.words.values() and "<" not in page.scripts[0]


def test_data_hold_every_head(maps, text):
    data = json.loads(Page(text).scripts[0])
    layers, heads = maps[0].head_weights.shape[:2]
    assert (data["layers"], data["heads"], data["layer"], data["head"]) == (layers, heads, layers - 1, 2)
    for sentence, attention in zip(data["sentences"], maps, strict=True):
        assert_packed(sentence, attention.head_weights)
        for side in ("source", "target"):
            assert sentence[side]["ids"] == getattr(attention, f"{side}_word_ids")
            assert len(sentence[side]["tokens"]) == len(sentence[side]["ids"])


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script")
@pytest.mark.parametrize("choice", [("", ""), ("0", ""), ("1", "3")])
def test_script_computes_the_weights_of_words(maps, text, choice):
    page = Page(text)
    functions = re.findall(r"^function (?:tokenWeights|wordWeights)\(.*?^}$", page.scripts[1], re.DOTALL | re.MULTILINE)
    layer, head = (json.dumps({"value": value}) for value in choice)
    program = f"""
        const data = {page.scripts[0]};
        const controls = {{ layer: {layer}, head: {head} }};
        {" ".join(functions)}
        console.log(JSON.stringify(data.sentences.map(wordWeights)));
    """
    for given, attention in zip(run_script(program), maps, strict=True):
        heads = attention.head_weights
        heads = heads if choice[0] == "" else heads[[int(choice[0])]]
        heads = heads if choice[1] == "" else heads[:, [int(choice[1])]]
        expected = word_weights(dataclasses.replace(attention, weights=heads.mean((0, 1))))
        # Each token of a source word may be off by half a step of 1/255.
        tokens = np.bincount([word for word in attention.source_word_ids if word is not None]).max()
        np.testing.assert_allclose(given, expected, atol=0.002 * tokens)
        assert np.abs(np.array(given) - expected).mean() < 0.004


def weights_of(path):
    data = json.loads(Page(path.read_text(encoding="utf-8")).scripts[0])
    return data, [len(sentence["weights"]) for sentence in data["sentences"]]


def test_what_exceeds_the_limit_is_left_out_and_said(maps, tmp_path, caplog):
    path = tmp_path / "page.html"
    write_attention_page(maps, path)
    _, sizes = weights_of(path)
    assert "would exceed" not in path.read_text(encoding="utf-8") and not caplog.records
    write_attention_page(maps, path, max_weight_bytes=sum(sizes))
    assert weights_of(path)[1] == sizes
    layers, heads = maps[0].head_weights.shape[:2]
    write_attention_page(maps, path, max_weight_bytes=sum(sizes) - 1, layer=1, head=1)
    data, fewer = weights_of(path)
    assert (data["layers"], data["heads"], data["layer"], data["head"]) == (layers, 0, 1, None)
    assert_packed(data["sentences"][0], maps[0].head_weights.mean(1))
    said = f"would exceed {sum(sizes) - 1:,} bytes: this is the mean of each layer, not head 1 alone."
    assert said in path.read_text(encoding="utf-8")
    assert f"{layers} layers of {heads} heads" in caplog.text
    write_attention_page(maps, path, max_weight_bytes=sum(fewer) - 1)
    data, fewest = weights_of(path)
    assert (data["layers"], data["heads"]) == (0, 0)
    assert_packed(data["sentences"][1], maps[1].weights)
    with pytest.raises(ValueError, match=rf"at most {sum(fewest) - 1:,} bytes in one page, got 4 sentences that take"):
        write_attention_page(maps, path, max_weight_bytes=sum(fewest) - 1)


CHOICES = {
    "all": (None, None, "the mean over all layers and heads", ["mean of all", "mean"]),
    "layer": (-1, None, "layer 1, the mean over its heads", ["1", "mean"]),
    "head": (0, -2, "layer 0, head 2", ["0", "2"]),
}


@pytest.mark.parametrize(("layer", "head", "name", "menus"), CHOICES.values(), ids=CHOICES)
def test_page_of_the_chosen_weights_alone_names_them(maps, tmp_path, caplog, layer, head, name, menus):
    assert maps[0].head_weights.shape[:2] == (2, 4)
    limit = sum(4 * -(-attention.weights.size // 3) for attention in maps)
    options = {"layer": layer, "head": head, "max_weight_bytes": limit}
    text = write_attention_page(maps, tmp_path / "page.html", **options).read_text(encoding="utf-8")
    assert f"All heads would exceed {limit:,} bytes: this is {name}." in text
    assert f"bytes: this is {name}. 4 sentences, 2 layers of 4 heads." in caplog.text
    scripts = Page(text).scripts
    assert list(json.loads(scripts[0])["choice"].values()) == menus
    if shutil.which("node") is None:
        return
    [function] = re.findall(r"^function fillControls\(.*?^}$", scripts[1], re.DOTALL | re.MULTILINE)
    program = f"""
        const data = {scripts[0]}, shown = [], controls = {{ layer: {{}}, head: {{}} }};
        const addOption = (select, value, text) => shown.push(text);
        {function}
        fillControls();
        console.log(JSON.stringify(shown));
    """
    assert run_script(program) == menus


def test_maps_without_heads_or_words(maps, tmp_path):
    bare = dataclasses.replace(maps[0], head_weights=None, source_word_ids=None)
    path = write_attention_page([bare], tmp_path / "page.html", layer=1, head=3)
    data, _ = weights_of(path)
    assert (data["layers"], data["heads"], data["choice"]) == (0, 0, {"layer": "1", "head": "3"})
    [sentence] = data["sentences"]
    assert sentence["source"]["words"] == bare.source_tokens and sentence["target"]["words"] == bare.target_words
    assert sentence["source"]["ids"] == list(range(len(bare.source_tokens)))


@pytest.mark.parametrize("count", [0, MAX_SENTENCES + 1])
def test_number_of_sentences_is_limited(maps, tmp_path, count):
    with pytest.raises(ValueError, match=f"must show 1 to {MAX_SENTENCES} sentences, got {count}"):
        write_attention_page(maps[:1] * count, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
