"""Tests of the page at /ui: its endpoints, and clicks in Chromium."""

import base64
import hashlib
import re

import numpy as np
import pytest
import requests
from chromium import one, texts, wait_for
from local_server import running, upper_service
from tiny_generator import tiny_generator

from metaphrase.analysis.alignment import cross_attentions, word_weights
from metaphrase.serving import Limits
from metaphrase.serving.batcher import Batcher
from metaphrase.serving.models import ServedModel
from metaphrase.serving.service import Service

HOSTILE = """</textarea><script>window.hacked=1</script> <b id="x">&amp; \u202eabc שלום 👩‍💻 {{script}}"""


@pytest.fixture(scope="module")
def url():
    with running(upper_service()) as address:
        yield address


@pytest.fixture(scope="module")
def torch_url():
    """A server with a torch model without languages. The targets of its seed are not blank."""
    batcher = Batcher()
    models = [ServedModel("tiny", tiny_generator(seed=9), batcher, languages=None, task="text2text-generation")]
    with running(Service(models, batcher)) as address:
        yield address


@pytest.fixture
def browser(chrome):
    chrome.get_log("browser")
    yield chrome
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.execute_script("localStorage.clear(); sessionStorage.clear()")


def open_page(browser, url):
    browser.get(f"{url}/ui")
    wait_for(lambda: one(browser, "#count").text)
    return one(browser, "#source")


def wait_for_target(browser, text):
    wait_for(lambda: texts(browser, "#target") == [text])


def test_page_stands_alone_and_its_policy_allows_nothing_else(url):
    answer = requests.get(f"{url}/ui")
    page, policy = answer.text, answer.headers["Content-Security-Policy"]
    assert not re.search(
        r"https?:(?!//www.w3.org/2000/svg)|@import|url\(|innerHTML|\son\w+=|style=|<iframe|<img| src=", page
    )
    for tag in ("style", "script"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


def test_settings_name_models_and_languages(url, torch_url):
    settings = requests.get(f"{url}/ui/settings").json()
    assert [model["name"] for model in settings["models"]] == ["en-de", "de-en"]
    assert settings["models"][0]["target_languages"] == [{"code": "de", "name": "German"}]
    assert settings["max_text_characters"] == Limits().max_text_characters and not settings["needs_key"]
    [model] = requests.get(f"{torch_url}/ui/settings").json()["models"]
    assert model["source_languages"] == [] and model["has_attention"]


def test_translation_keeps_the_layout(url):
    text = "- One cat. Two dogs.\n\n\tThree birds."
    answer = requests.post(f"{url}/ui/translate", json={"text": text}).json()
    assert answer["layout"] == ["- ", " ", "\n\n\t", ""]
    assert [sentence["source"] for sentence in answer["sentences"]] == ["One cat.", "Two dogs.", "Three birds."]
    assert [sentence["targets"] for sentence in answer["sentences"]] == [["ONE CAT."], ["TWO DOGS."], ["THREE BIRDS."]]
    assert requests.post(f"{url}/ui/translate", json={"text": " \n"}).json()["sentences"] == []


def test_attention_is_that_of_the_model(torch_url):
    pair = {"source": "two dogs run", "target": "die Katze"}
    answer = requests.post(f"{torch_url}/ui/attention", json=pair).json()
    [attention] = cross_attentions(tiny_generator(seed=9), [pair["source"]], [pair["target"]], layer=-1)
    assert (answer["source_words"], answer["target_words"]) == (["two", "dogs", "run"], ["die", "Katze"])
    np.testing.assert_allclose(answer["weights"], word_weights(attention), atol=1e-4)


def test_refusals_are_one_line(torch_url):
    for path, body, message in (
        ("attention", {"source": "a" * 600, "target": "a"}, "at most 512 tokens for attention, got 601"),
        ("attention", {"source": "a"}, "`target` must be given"),
        ("translate", {"text": "a", "num_targets": 99}, "The number of targets must be from 1 to 16, got 99"),
        ("translate", {"text": "a" * 100_001}, "at most 100000 characters, got 100001"),
    ):
        answer = requests.post(f"{torch_url}/ui/{path}", json=body)
        assert answer.status_code == 400 and message in answer.json()["error"]


def test_typing_shows_a_translation(browser, url):
    source = open_page(browser, url)
    source.send_keys("The cat sleeps. ", browser.keys.ENTER, "- It is old.")
    wait_for_target(browser, "THE CAT SLEEPS. \n- IT IS OLD.")
    assert one(browser, "#count").text == "29 / 100,000"
    assert (source.get_attribute("lang"), one(browser, "#target").get_attribute("lang")) == ("en", "de")
    one(browser, "#clear").click()
    wait_for_target(browser, "")
    assert browser.get_log("browser") == []


def test_hostile_text_is_inert(browser, torch_url, url):
    for address in (url, torch_url):
        source = open_page(browser, address)
        browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new InputEvent('input'))", source, HOSTILE
        )
        wait_for(lambda: browser.find_elements("css selector", ".word"))
        if address == url:
            wait_for_target(browser, HOSTILE.upper())
        assert texts(browser, "#mirror") == [HOSTILE + "\n"]
        state = browser.execute_script("return [window.hacked ?? null, document.querySelectorAll('#x, script').length]")
        assert state == [None, 1] and browser.get_log("browser") == []


def test_page_asks_for_a_key_where_the_server_needs_one(browser, url):
    open_page(browser, url)
    assert not one(browser, "#key").is_displayed()
    with running(upper_service(api_keys=["secret"])) as guarded:
        open_page(browser, guarded).send_keys("the cat")
        wait_for(lambda: one(browser, "#status").text == "Enter an API key.")
        key = one(browser, "#key")
        key.send_keys("wrong", browser.keys.ENTER)
        wait_for(lambda: one(browser, "#status").text == "The API key must be one of the server's.")
        assert key.get_attribute("aria-invalid") == "true"
        key.clear()
        key.send_keys("secret", browser.keys.ENTER)
        wait_for_target(browser, "THE CAT")
        assert one(browser, "#status").text == ""
        # Another load of the same tab has the key.
        open_page(browser, guarded).send_keys("a dog")
        wait_for_target(browser, "A DOG")
