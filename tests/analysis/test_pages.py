import base64
import dataclasses
import functools
import html
import json
import re
import warnings

import numpy as np
import pytest
import torch
from chromium import one, texts
from figure_files import png_size
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.analysis.explanation import PositionMap
from metaphrase.analysis.pages import draw_attention_map, write_explanation_page
from metaphrase.hub_card.figures import DOTS_PER_INCH
from metaphrase.inference import explain

EVIL = """</script><script>window.hacked=1</script> <b id="x">&amp; 'q' "q" <!-- {{data}} \\u003c $& שלום \u202e 👩‍💻 \x07"""
LONG = "a " * 255 + "b"
OPTIONS = {"max_new_tokens": 5, "num_beams": 3}


@pytest.fixture(scope="module")
def shown():
    generator = tiny_generator(kind="byte")
    pairs = [(SOURCES[3], TARGETS[3]), (EVIL, EVIL)]
    return [explain(generator, *pair, **OPTIONS) for pair in pairs]


@pytest.fixture(scope="module")
def path(shown, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "new" / "page.html"
    assert write_explanation_page(shown, path, title=EVIL) == path
    return path


def scripts_of(path):
    return re.findall(r"<script\b[^>]*>(.*?)</script", path.read_text(encoding="utf-8"), re.DOTALL | re.IGNORECASE)


def data_of(path):
    return json.loads(scripts_of(path)[0])


def unpack(packed):
    return np.frombuffer(base64.b64decode(packed["bytes"]), dtype=np.uint8).reshape(packed["shape"])


def test_page_stands_alone_and_texts_are_inert(path):
    text, scripts = path.read_text(encoding="utf-8"), scripts_of(path)
    assert not re.search(
        r"https?:(?!//www.w3.org/2000/svg)|@import|url\(|\bfetch\b|XMLHttp|innerHTML|<link|<iframe|<img", text
    )
    for tag in re.findall(
        r"<[a-z][^>]*>", functools.reduce(lambda page, script: page.replace(script, ""), scripts, text)
    ):
        assert not re.search(r'\s(src|srcset|action|style|on\w+)=|\shref="?[^#"]', tag), tag
    assert len(scripts) == 2 and "hacked" not in scripts[1] and "<" not in scripts[0]
    [title] = re.findall(r"<title>(.*?)</title>", text, re.DOTALL)
    assert html.unescape(title).strip() == EVIL.replace("\x07", "\\x07")
    assert not re.search(r"\{\{(title|script)\}\}", text)
    assert json.loads(scripts[0])["pairs"][1]["source"] == EVIL


def test_data_are_those_of_the_explanation(shown, path):
    for pair, explanation in zip(data_of(path)["pairs"], shown, strict=True):
        for name, weights in explanation.attentions.items():
            np.testing.assert_allclose(unpack(pair["attentions"][name]) / 255, weights, atol=0.002)
            np.testing.assert_array_equal(unpack(pair["masks"][name])[0, 0] > 0, explanation.masks[name])
        for packed, item in zip(pair["positions"], explanation.positions, strict=True):
            values = (unpack(packed) - 128.0) / 127 * packed["largest"]
            np.testing.assert_allclose(values, item.values, atol=packed["largest"] / 250)
        assert pair["ranks"] == explanation.ranks.tolist() and pair["loss"] == explanation.loss
        assert len(pair["beam"]["nodes"]) == len(explanation.beam_tree.nodes)


def test_positions_keep_their_scale(shown, tmp_path):
    large = PositionMap("large", "bias", np.array([[[-4.0, 2.0]]]))
    zero = PositionMap("zero", "added", np.zeros((1, 1, 2)))
    explanation = dataclasses.replace(shown[0], positions=[large, zero])
    packed = data_of(write_explanation_page([explanation], tmp_path / "page.html"))["pairs"][0]["positions"]
    assert [item["largest"] for item in packed] == [4.0, 1.0]
    assert [unpack(item).ravel().tolist() for item in packed] == [[1, 192], [128, 128]]


@pytest.fixture
def browser(chrome, path):
    chrome.get(path.as_uri())
    assert chrome.get_log("browser") == []
    return chrome


def line(browser, selector):
    """Return the text of an element without the marks that keep the direction of a token from the rest of the line."""
    return re.sub("[\u2068\u2069]", "", one(browser, selector).text)


def visible(text):
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u202e]", lambda match: f"\\u{ord(match[0]):04x}", text)


def choose(browser, name, value):
    one(browser, f"#{name} option[value='{value}']").click()


def test_clicks_show_the_numbers_of_the_model(browser, shown):
    first = shown[0]
    assert texts(browser, "#stages tbody tr td:nth-child(3)") == [" × ".join(map(str, s.shape)) for s in first.stages]
    assert texts(browser, "#labels tbody tr td:nth-child(5)")[:-1] == [str(rank) for rank in first.ranks]
    choose(browser, "unit", "tokens")
    for kind, layer, head in [("cross", 1, None), ("encoder", 0, 2), ("decoder", 1, 3)]:
        choose(browser, "kind", kind)
        choose(browser, "layer", layer)
        if head is not None:
            choose(browser, "head", head)
        weights = first.attentions[kind][layer]
        row = (weights.mean(axis=0) if head is None else weights[head])[2]
        button = browser.find_elements("css selector", "#queries button")[2]
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        percents = browser.execute_script(
            "return [...document.querySelectorAll('#keys button')].map((e) => parseFloat(e.style.getPropertyValue('--weight')))"
        )
        np.testing.assert_allclose(percents, row, atol=0.004)
        best = first.source_tokens if kind != "decoder" else first.decoder_tokens
        assert line(browser, "#reading").split(" ← ")[1].startswith(best.tokens[row.argmax()])
        button.click()
        assert button.get_attribute("aria-pressed") == "false"


def test_words_of_a_row_add_up_to_one(browser, shown):
    words = shown[0].source_tokens.words
    assert texts(browser, "#keys button") == words and words[-1] == "</s>"
    weights = shown[0].attentions["cross"][-1].mean(axis=0)
    sources, targets = (np.array(side.word_ids) for side in (shown[0].source_tokens, shown[0].target_tokens))
    browser.find_elements("css selector", "#queries button")[1].click()
    given = browser.execute_script("return shares")
    np.testing.assert_allclose(np.sum(given, axis=1), 1, atol=0.02)
    expected = [
        [weights[targets == t][:, sources == s].sum(1).mean() for s in range(len(words))] for t in range(len(given))
    ]
    np.testing.assert_allclose(given, expected, atol=0.02)


def test_steps_and_tree(browser, shown):
    first = shown[0]
    one(browser, "#next").click()
    step = first.paths["target"][1]
    assert texts(browser, "#candidates tbody tr td:nth-child(2)") == [str(index) for index in step.ids]
    shares = [float(text.split(" %")[0]) for text in texts(browser, "#candidates tbody tr td:nth-child(3)")]
    np.testing.assert_allclose(shares, 100 * np.array(step.probabilities), rtol=0.01)
    cut = [text.startswith("cut") for text in texts(browser, "#candidates tbody tr td:nth-child(6)")]
    assert cut == [share == 0 for share in step.top_k.probabilities]
    nodes = first.beam_tree.nodes
    assert len(texts(browser, ".node")) == len(nodes)
    best = next(node for node in nodes if node.rank == 1)
    assert f"result 1 with score {best.score:.4f}" in one(browser, "#hypothesis").text
    index = next(index for index, node in enumerate(nodes) if node.state == "pruned")
    one(browser, f".node[data-node='{index}'] rect").click()
    assert f"log-probability {nodes[index].total:.4f}, pruned" in one(browser, "#hypothesis").text
    keys = browser.keys
    browser.switch_to.active_element.send_keys(keys.ARROW_UP)
    assert f"log-probability {nodes[index - 1].total:.4f}, " in one(browser, "#hypothesis").text
    choose(browser, "path", "beam")
    assert texts(browser, "#candidates tr.chosen td:nth-child(2)") == [str(first.paths["beam"][0].choice)]


def test_hostile_text_is_inert(browser, shown):
    choose(browser, "pair", 1)
    hostile = shown[1]
    assert one(browser, "h1").text.startswith("</script><script>window.hacked=1</script> <b")
    tokens = texts(browser, "#token-lists .tokens:first-child .token")
    ids = [str(index) for index in hostile.source_tokens.ids]
    assert tokens == [visible(token) + index for token, index in zip(hostile.source_tokens.tokens, ids, strict=True)]
    words = list(map(visible, hostile.source_tokens.words))
    assert texts(browser, "#keys button") == words
    for word in ("</script><script>window.hacked=1</script>", "שלום", "\\u202e", "👩‍💻"):
        browser.find_elements("css selector", "#keys button")[words.index(word)].click()
        assert line(browser, "#reading").startswith(f"{word} → ")
        # The direction of the word ends with it.
        assert f"\u2068{word}\u2069 → " in texts(browser, "#reading")[0]
    assert "\u202e" not in "".join(texts(browser, "main"))
    assert browser.execute_script("return [window.hacked ?? null, document.querySelectorAll('#x').length]") == [None, 0]
    assert browser.get_log("browser") == []


def test_attention_map_grows_with_its_tokens_and_keeps_long_labels_whole(tmp_path):
    def draw(rows, columns, label="t", **options):
        weights = torch.eye(rows, columns, requires_grad=True)  # one scale, hence one width of the colour bar
        return png_size(draw_attention_map(weights, ["s"] * columns, [label] * rows, tmp_path / "map.png", **options))

    small, large = draw(5, 15), draw(8, 21)
    cell = 0.34 * DOTS_PER_INCH
    assert large[0] - small[0] == pytest.approx(6 * cell, abs=3) and large[1] > small[1]
    label = "a_rather_long_token_indeed"
    longer = draw(5, 15, label, title="Layer 1")
    assert longer[0] > small[0] + 8 * len(label) and longer[1] > small[1]


def test_attention_map_takes_any_token_without_a_warning(tmp_path):
    tokens = ["日本", "🙂", "$x$", "^_{", "a\nb", "", " ", r"$\frac$", "▁the", "\u200d"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = draw_attention_map(np.eye(10), tokens, tokens, tmp_path / "map.png", title=r"日本 $\frac$")
    assert min(png_size(path)) > 10 * 0.34 * DOTS_PER_INCH
    with pytest.raises(ValueError, match=r"got \(2, 3\) for 3 target and 2 source tokens"):
        draw_attention_map(np.ones((2, 3)) / 3, ["a", "b"], ["x", "y", "z"], tmp_path / "map.png")
