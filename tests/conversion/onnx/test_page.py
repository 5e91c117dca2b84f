"""Tests of the exported page in Chromium: types a text, reads the target, clicks a word."""

import contextlib
import functools
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import chromium, one, requested_urls, texts, wait_for
from node_packages import node_modules
from source_files import ROOT
from tiny_generator import save_generator, tiny_generator

from metaphrase.conversion.onnx.export import GRAPH_NAMES, export_web

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(folder):
    handler = type("QuietHandler", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A generator, and the folder of its export with the library. The page loads the weights in float32."""
    folder, generator = tmp_path_factory.mktemp("page"), tiny_generator(joint=False, layers=1)
    export_web(save_generator(generator, folder / "model"), folder / "web", library=node_modules())
    for name in GRAPH_NAMES:
        graph = folder / "web" / "onnx" / name
        shutil.copy(graph, graph.with_stem(f"{graph.stem}_quantized"))
    return generator, folder / "web"


@pytest.fixture(scope="module")
def site(exported):
    with serving(exported[1]) as url:
        yield url


@pytest.fixture
def browser():
    with chromium() as browser:
        yield browser


def open_page(browser, url):
    browser.get(url)
    wait_for(lambda: one(browser, "#loading").get_property("hidden"), seconds=60)


def enter(browser, text):
    """Put a text in place of the source, as typing does, and wait for the target."""
    script = "const [text] = arguments, box = document.getElementById('source'); box.value = text;"
    browser.execute_script(script + "box.dispatchEvent(new InputEvent('input')); target.ariaBusy = 'true';", text)
    wait_for(lambda: one(browser, "#target").get_attribute("aria-busy") == "false", seconds=60)


def warnings_of(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


def test_a_reader_types_a_text_and_sees_source_words(exported, site, browser):
    generator, _ = exported
    open_page(browser, site)
    source = one(browser, "#source")
    source.send_keys("the cat sleeps")
    lines = ["the cat sleeps", "a small dog runs"]
    greedy = generator.generate(lines, num_beams=1)
    wait_for(lambda: texts(browser, "#target") == greedy[:1])
    # Layout stays, and only the new line is decoded.
    source.send_keys("\n\n a small dog runs")
    wait_for(lambda: texts(browser, "#target") == [f"{greedy[0]}\n\n {greedy[1]}"])
    word = browser.find_elements("css selector", ".word")[0]
    word.click()
    assert texts(browser, ".word.active") == [word.text]
    assert texts(browser, "#words") == ["the cat sleeps"] and texts(browser, "#words mark")
    assert texts(browser, "#hint") == [f"Source words of \u2068{word.text}\u2069:"]
    # By keys: to the next word, choose it, and leave.
    word.send_keys(browser.keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(browser.keys.ENTER)
    assert texts(browser, ".word.active") == texts(browser, ".word")[1:2]
    browser.switch_to.active_element.send_keys(browser.keys.ESCAPE)
    assert texts(browser, ".word.active") == []
    browser.execute_script("search.value = '4'; search.dispatchEvent(new Event('change'))")
    beams = generator.generate(lines, num_beams=4)
    wait_for(lambda: texts(browser, "#target") == [f"{beams[0]}\n\n {beams[1]}"])
    assert warnings_of(browser) == []


def test_no_request_leaves_the_origin(site, browser):
    open_page(browser, site)
    enter(browser, "a cat")
    urls = requested_urls(browser)
    own = [url for url in urls if url.startswith(site)]
    assert {url.removeprefix(site) for url in own} >= {"", "page.mjs", "library/transformers.min.js", "config.json"}
    # The browser itself has pages of its own, and the icon is in the page.
    assert [url for url in urls if url not in own and not url.startswith(("data:", "chrome://"))] == []


HOSTILE = [
    "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>",
    "\u202e\u2066 cat \u202d</s><pad> a dog\x00\ufeff",
    "a\u0301\u0489\u20dd 👨‍👩‍👧 \ufffd cat",
]


def test_hostile_texts_are_inert(site, browser):
    open_page(browser, site)
    for text in HOSTILE:
        enter(browser, text)
        assert texts(browser, "#target img, #target script, #words img, #words script") == []
        for word in browser.find_elements("css selector", ".word")[:1]:
            browser.execute_script("arguments[0].click()", word)
        assert texts(browser, "#words img, #words script") == []
        assert browser.title == "Metaphrase"
    enter(browser, "a cat " * 2000)
    assert texts(browser, "#status") == ["The text has 12,000 characters. The page takes at most 10,000."]
    enter(browser, "a" * 10_000)
    assert texts(browser, ".wrong") == [
        "[The text has 10001 tokens. The model reads at most 256.]",
        "A part of the text is too long.",
    ]
    enter(browser, "the cat sleeps")
    assert texts(browser, "#target .wrong") == [] and texts(browser, ".word")
    assert warnings_of(browser) == []


@pytest.mark.parametrize("name, message", [("library", "library/ is missing"), ("onnx", "The model cannot be loaded.")])
def test_missing_files_get_a_sentence(name, message, exported, browser, tmp_path):
    shutil.copytree(exported[1], tmp_path / "web", ignore=shutil.ignore_patterns(name))
    with serving(tmp_path / "web") as url:
        browser.get(url)
        wait_for(lambda: message in one(browser, "#phase").text, seconds=60)


def test_page_of_the_documentation_works(exported, browser, tmp_path):
    generator, folder = exported
    page = re.search(r"```html\n(.*?)```", (ROOT / "docs" / "web.md").read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    shutil.copytree(folder, tmp_path / "web")
    (tmp_path / "web" / "own.html").write_text(page.replace("The cat is black.", "the cat"), encoding="utf-8")
    [expected] = generator.generate(["the cat"])
    with serving(tmp_path / "web") as url:
        browser.get(url + "own.html")
        wait_for(lambda: texts(browser, "#target") == [expected], seconds=60)
