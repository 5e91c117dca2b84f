"""Tests of the Open Inference Protocol."""

import pytest
import requests
from local_server import running, upper_service

from metaphrase.serving.limits import Limits


@pytest.fixture(scope="module")
def url():
    with running(upper_service(limits=Limits(max_body_kilobytes=4), api_keys=["right"])) as address:
        yield address + "/v2"


@pytest.fixture(scope="module")
def session():
    with requests.Session() as session:
        session.headers["Authorization"] = "Bearer right"
        yield session


def infer(session, url, texts, name="en-de", **fields):
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return session.post(f"{url}/models/{name}/infer", json={"inputs": [tensor], **fields})


def test_server_is_described(session, url):
    assert session.get(url).json()["name"] == "metaphrase"
    assert requests.get(url + "/health/live").json() == {"live": True}
    assert requests.get(url + "/health/ready").json() == {"ready": True}


def test_model_is_described(session, url):
    model = session.get(url + "/models/de-en").json()
    assert (model["name"], model["platform"]) == ("de-en", "metaphrase")
    tensor = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    assert model["inputs"] == model["outputs"] == [tensor]
    assert session.get(url + "/models/de-en/ready").json() == {"name": "de-en", "ready": True}


def test_texts_are_decoded(session, url):
    answer = infer(session, url, ["a cat", "a dog"], id="7", parameters={"tgt_lang": "de", "max_new_tokens": 9}).json()
    assert (answer["id"], answer["model_name"]) == ("7", "en-de")
    assert answer["outputs"] == [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["A CAT", "A DOG"]}]


def test_errors_have_a_message(session, url):
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a cat"]}
    answers = [
        (404, infer(session, url, ["a cat"], name="other")),
        (404, infer(session, url, ["a cat"], parameters={"tgt_lang": "fr"})),
        (404, session.get(url + "/models/other/ready")),
        (413, infer(session, url, ["a" * 5000])),
        (400, session.post(url + "/models/en-de/infer", "{")),
        (400, session.post(url + "/models/en-de/infer", json={"inputs": []})),
        (400, session.post(url + "/models/en-de/infer", json={"inputs": [tensor]})),
        (
            400,
            session.post(url + "/models/en-de/infer", json={"inputs": [tensor | {"datatype": "FP32", "data": [1.5]}]}),
        ),
        (400, infer(session, url, ["a cat"], parameters={"eos_token_id": 3})),
        (401, requests.get(url)),
        (401, requests.post(url + "/models/en-de/infer", json={})),
    ]
    for status, answer in answers:
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
