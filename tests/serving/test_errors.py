"""Tests of errors that no client causes."""

import logging

import requests
from identity_engine import identity_generator
from local_server import running, upper_service


def fail(text):
    raise RuntimeError(f"cannot decode {text}")


def test_failure_is_one_failed_request_without_its_text_in_the_log(caplog):
    with running(upper_service(identity_generator(fail))) as url, caplog.at_level(logging.INFO):
        bodies = {
            "/": {"inputs": "secret"},
            "/translate": {"q": "secret", "source": "en", "target": "de"},
            "/v2/translate": {"text": ["secret"], "target_lang": "DE"},
            "/v1/completions": {"model": "en-de", "prompt": "secret"},
        }
        answers = {path: requests.post(url + path, json=body) for path, body in bodies.items()}
        assert requests.get(url + "/health").status_code == 200
    assert {answer.status_code for answer in answers.values()} == {500}
    fields = [next(iter(answer.json())) for answer in answers.values()]
    assert fields == ["error", "error", "message", "error"]
    assert "/translate failed: RuntimeError." in caplog.messages
    assert "secret" not in caplog.text and "secret" not in "".join(answer.text for answer in answers.values())
