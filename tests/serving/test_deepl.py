import itertools

import deepl
import pytest
import requests


def client_of(url, key="right"):
    return deepl.DeepLClient(key, server_url=url)


@pytest.fixture
def client(guarded_url):
    return client_of(guarded_url)


def test_client_translates_texts(client, guarded_url):
    before = client.get_usage().character
    result = client.translate_text("a small dog runs", target_lang="DE")
    assert (result.text, result.detected_source_lang) == ("A SMALL DOG RUNS", "EN")
    after = client.get_usage().character
    assert after.count - before.count == result.billed_characters == 16 and after.valid and not after.limit_reached
    results = client.translate_text(["der Hund", "ein Hund"], source_lang="DE", target_lang="EN-US")
    assert [result.text for result in results] == ["DER HUND", "EIN HUND"]
    form, headers = {"text": ["a cat", "a dog"], "target_lang": "de"}, {"Authorization": "DeepL-Auth-Key right"}
    rows = requests.post(guarded_url + "/v2/translate", form, headers=headers).json()["translations"]
    assert rows == [{"detected_source_language": "EN", "text": text} for text in ("A CAT", "A DOG")]


def test_lines_are_split_or_joined(client):
    text = "the cat\nsleeps. a dog\n\nruns"
    options = {"source_lang": "EN", "target_lang": "DE"}
    for split, expected in (("1", text.upper()), ("0", text.upper()), ("nonewlines", "THE CAT SLEEPS. A DOG\n\nRUNS")):
        assert client.translate_text(text, split_sentences=split, **options).text == expected


def test_client_lists_languages(client):
    sources = [(language.code, language.name) for language in client.get_source_languages()]
    assert sources == [("EN", "English"), ("DE", "German")]
    targets = client.get_target_languages()
    assert [language.code for language in targets] == ["DE", "EN-GB", "EN-US"]
    assert not any(language.supports_formality for language in targets)


def test_glossary_and_tags_have_their_effect(model_url):
    markup_client = client_of(model_url)
    result = markup_client.translate_text("the cat", source_lang="EN", target_lang="DE", glossary="pets")
    assert "Kater" in result.text
    html = markup_client.translate_text('<p>the <a href="x">cat</a></p>', target_lang="DE", tag_handling="html").text
    assert html.startswith("<p>") and html.count('<a href="x">') == html.count("</a>") == 1
    for form, text in (("xml", "<s>the cat <x>sleeps</x> runs</s>"), ("html", "<p>the cat <x>sleeps</x> runs</p>")):
        result = markup_client.translate_text(text, target_lang="DE", tag_handling=form, ignore_tags="y,x")
        assert "<x>sleeps</x>" in result.text and "cat" not in result.text


def test_ignored_tags_are_a_list_or_one_text_with_commas(model_url):
    headers = {"Authorization": "DeepL-Auth-Key right"}
    body = {"text": ["<s>the <y>cat</y> <x>sleeps</x> runs</s>"], "target_lang": "DE", "tag_handling": "xml"}
    for kind, tags in itertools.product(("data", "json"), (["y", "x"], ["y,x"])):
        answer = requests.post(
            model_url + "/v2/translate", headers=headers, **{kind: body | {"ignore_tags": tags}}
        ).json()
        [row] = answer["translations"]
        assert "<y>cat</y>" in row["text"] and "<x>sleeps</x>" in row["text"], (kind, tags)


def test_client_raises_its_errors(client, guarded_url):
    with pytest.raises(deepl.AuthorizationException, match="API key"):
        client_of(guarded_url, "wrong").translate_text("a cat", target_lang="DE")
    for message, options in (
        ("en-de, de-en", {"target_lang": "FR"}),
        ("en-de, de-en", {"target_lang": "DE", "source_lang": "FR"}),
        ("`formality`", {"target_lang": "DE", "formality": "more"}),
        ("glossary", {"target_lang": "DE", "source_lang": "EN", "glossary": "other"}),
        ("`splitting_tags`", {"target_lang": "DE", "splitting_tags": "p"}),
    ):
        with pytest.raises(deepl.DeepLException, match=message):
            client.translate_text("a cat", **options)
    with pytest.raises(deepl.DeepLException, match="at most 4 kB"):
        client.translate_text("a" * 5000, target_lang="DE")
