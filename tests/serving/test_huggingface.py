"""Tests of the API for Hugging Face's client."""

import pytest
from huggingface_hub import InferenceClient, constants
from local_server import running, upper_service


@pytest.fixture(scope="module")
def url():
    with running(upper_service()) as address:
        yield address


@pytest.fixture
def client(url, monkeypatch):
    # Offline, the client refuses even the loopback network.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return InferenceClient(model=url)


def test_client_translates(client):
    assert client.translation("a small dog runs").translation_text == "A SMALL DOG RUNS"


def test_client_sets_languages(client):
    assert client.translation("the cat", src_lang="en", tgt_lang="de").translation_text == "THE CAT"
