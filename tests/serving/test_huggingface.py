"""Tests of the API for Hugging Face's client."""

import pytest
import requests
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from local_server import running
from tiny_generator import tiny_generator

from metaphrase.serving import Limits
from metaphrase.serving.batcher import Batcher
from metaphrase.serving.models import ServedModel
from metaphrase.serving.service import Service


@pytest.fixture(scope="module")
def writer():
    return tiny_generator()


@pytest.fixture(scope="module")
def writer_url(writer):
    batcher = Batcher()
    model = ServedModel("writer", writer, batcher, languages=None, task="summarization")
    service = Service([model], batcher, limits=Limits(max_body_kilobytes=4), api_keys=["right"])
    with running(service) as address:
        yield address


@pytest.fixture
def connect(writer_url, monkeypatch):
    # Offline, the client refuses even the loopback network.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda key="right": InferenceClient(model=writer_url, token=key)


def test_client_translates(connect, guarded_url):
    client = InferenceClient(model=guarded_url, token="right")
    assert client.translation("a small dog runs").translation_text == "A SMALL DOG RUNS"
    with pytest.raises(HfHubHTTPError, match="'fr'"):
        client.translation("the cat", src_lang="en", tgt_lang="fr")


def test_client_summarizes_and_generates(connect, writer):
    [expected] = writer.generate(["the cat"], num_beams=2)
    assert connect().summarization("the cat", generate_parameters={"num_beams": 2}).summary_text == expected
    [expected] = writer.generate(["the cat"], max_new_tokens=5)
    assert connect().text_generation("the cat", max_new_tokens=5) == expected
    output = connect().text_generation("the cat", max_new_tokens=5, details=True)
    assert (output.generated_text, output.details.finish_reason) == (expected, "length")
    stop = expected[2:4]
    assert connect().text_generation("the cat", stop=[stop]) == expected[: expected.index(stop)]


def test_client_reads_a_stream(connect, writer):
    [expected], client = writer.generate(["the cat"]), connect()
    pieces = list(client.text_generation("the cat", stream=True))
    assert "".join(pieces) == expected
    *_, last = client.text_generation("the cat", stream=True, details=True)
    assert (last.generated_text, last.details.finish_reason) == (expected, "length")
    assert last.details.input_length == len("the cat") + 1
    assert last.details.generated_tokens == len(expected) + 1
    stop = expected[2:4]
    pieces = client.text_generation("the cat", stream=True, stop=[stop])
    assert "".join(pieces) == expected[: expected.index(stop)]


def test_client_classifies(connect, writer, writer_url):
    labels, client = ["dog", "cat", "a mouse"], connect()
    [row] = writer.choice_scores(["the cat"], labels)
    best = sorted(zip(labels, row.tolist(), strict=True), key=lambda pair: -pair[1])
    # The worst label comes first.
    labels = [label for label, _ in reversed(best)]
    answer = client.zero_shot_classification("the cat", labels)
    assert [(item.label, item.score) for item in answer] == [(label, pytest.approx(score)) for label, score in best]
    [row] = writer.choice_scores(["the cat"], [f"the {label}" for label in labels])
    answer = client.zero_shot_classification("the cat", labels, hypothesis_template="the {}")
    assert answer[0].label == labels[row.argmax()] and answer[0].score == pytest.approx(row.max())
    for message, words, options in (
        ("multi_label", labels, {"multi_label": True}),
        ("hypothesis_template", labels, {"hypothesis_template": "the"}),
        ("two or more different answers", ["dog", "dog"], {}),
        ("at most 128 texts", [*map(str, range(128))], {}),
    ):
        with pytest.raises(HfHubHTTPError, match=message):
            client.zero_shot_classification("the cat", words, **options)
    # Several texts, and an option that would change nothing.
    for parameters, status in (({}, 200), ({"num_beams": 4}, 400)):
        body = {"inputs": ["the cat", "a dog"], "parameters": {"candidate_labels": labels, **parameters}}
        response = requests.post(writer_url, json=body, headers={"Authorization": "Bearer right"})
        assert response.status_code == status
        assert status == 400 or [item["label"] for item in response.json()[0]] == [label for label, _ in best]
        assert status == 200 or "num_beams" in response.text


def test_client_raises_its_errors(connect, writer_url):
    for key in ("wrong", None):
        with pytest.raises(HfHubHTTPError, match="401"):
            connect(key).summarization("the cat")
    for name, value in (("max_new_tokens", 3.5), ("temperature", 1e-300), ("num_return_sequences", "x")):
        with pytest.raises(HfHubHTTPError, match="must be"):
            connect().summarization("the cat", generate_parameters={name: value})
    for message, options in (("top_p", {"top_p": 2.0}), ("one of", {"stream": True, "best_of": 2})):
        with pytest.raises(ValidationError, match=message):
            list(connect().text_generation("the cat", **options))
    with pytest.raises(HfHubHTTPError, match="at most 4 kB"):
        connect().summarization("a" * 5000)
    # An option beside `parameters` would change nothing.
    body = {"inputs": "the cat", "num_beams": 4}
    answer = requests.post(writer_url, json=body, headers={"Authorization": "Bearer right"})
    assert answer.status_code == 400 and "num_beams" in answer.text
