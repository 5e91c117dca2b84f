"""Tests of what all APIs share: limits, keys, errors, streams, metrics, logs, clients that go away, and the end."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import threading
import time

import pytest
import requests
from identity_engine import identity_generator
from local_server import running, upper_service
from tiny_generator import tiny_generator

from metaphrase.scripts import serve
from metaphrase.serving import Limits
from metaphrase.serving.service import Query, stream_target
from metaphrase.texts.whole_texts import TextDecoder

SECRET = "a sentence that nobody else may read"


def post(url, path="/", **options):
    return requests.post(url + path, timeout=30, **options)


def translate(url, text, **fields):
    return post(url, json={"inputs": text, **fields})


@pytest.fixture(scope="module")
def limited():
    limits = Limits(max_body_kilobytes=4, max_texts=2, max_text_characters=900)
    with running(upper_service(limits=limits)) as address:
        yield address


OPTIONS = [("num_beams", 17), ("max_new_tokens", 2000), ("num_return_sequences", 0), ("temperature", "hot")]
OPTIONS += [("decoder_start_token_id", 3), ("temperature", float("inf"))]
REFUSED = [(413, {"inputs": "a" * 5000}), (404, {"inputs": "a", "model": "other"})]
REFUSED += [(404, {"inputs": "a", "parameters": {"src_lang": "fr", "tgt_lang": "de"}})]
REFUSED += [(400, {"inputs": inputs}) for inputs in (["a"] * 3, ["a" * 500, "b" * 500], 3, ["a", 3])]
REFUSED += [(400, {"inputs": "a", "parameters": {name: value}}) for name, value in OPTIONS]
REFUSED += [(400, body) for body in ({}, [1], b"", b"{", b"\xff\xfe", b'{"inputs": ' + b"[" * 3000, b'{"inputs": NaN}')]


@pytest.mark.parametrize(("status", "body"), REFUSED)
def test_request_beyond_a_limit_is_refused(status, body, limited):
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = post(limited, data=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error", "error_type"}
    assert translate(limited, "a").json()[0]["translation_text"] == "A"


def test_body_without_length_is_bounded(limited):
    chunks = (b"a" * 65536 for _ in range(100))
    # The server may close the connection while the client is still sending.
    with contextlib.suppress(requests.exceptions.ConnectionError):
        assert post(limited, data=chunks).status_code == 413
    assert translate(limited, "a").ok


def test_clients_need_one_of_the_keys():
    with running(upper_service(api_keys=["first", "second"])) as address:
        assert translate(address, "a").status_code == 401
        for key, status in (("first", 200), ("second", 200), ("fir", 401), ("", 401), ("é", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert post(address, json={"inputs": "a"}, headers=headers).status_code == status
        assert requests.get(f"{address}/metrics", timeout=9).status_code == 401
        for path in ("/health", "/ui", "/ui/settings"):
            assert requests.get(f"{address}{path}", timeout=9).status_code == 200


def test_requests_beyond_the_queue_are_refused_at_once():
    event, limits = threading.Event(), Limits(max_requests=2, timeout_seconds=30)
    generator = identity_generator(lambda text: event.wait(20) and text.upper())
    service = upper_service(generator, limits=limits)
    with running(service) as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(translate, address, text) for text in ("a", "b")]
        while "metaphrase_requests_running 2.0" not in requests.get(f"{address}/metrics", timeout=9).text:
            time.sleep(0.01)
        started = time.monotonic()
        refused = translate(address, "c")
        assert time.monotonic() - started < 2
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error_type"] == "overloaded"
        event.set()
        assert [answer.result().json()[0]["translation_text"] for answer in accepted] == ["A", "B"]


def test_a_request_ends_in_time_or_is_refused():
    generator = identity_generator(lambda text: time.sleep(0.01) or text)
    with running(upper_service(generator, limits=Limits(timeout_seconds=5))) as address:
        started = time.monotonic()
        refused = translate(address, "\n".join(["a"] * 10_000))
        assert refused.status_code == 503 and "Send fewer texts" in refused.json()["error"]
        assert refused.headers["Retry-After"] == "1" and time.monotonic() - started < 4
        assert translate(address, "a").ok
    generator = identity_generator(lambda text: time.sleep(1.8) or text)
    with running(upper_service(generator, limits=Limits(timeout_seconds=1))) as address:
        started = time.monotonic()
        assert translate(address, "a").status_code == 503
        assert time.monotonic() - started < 1.7


def test_sources_with_unknown_tokens_are_counted_in_a_header():
    with running(upper_service(tiny_generator())) as address:
        answers = [requests.post(address, json={"inputs": texts}) for texts in (["a ж. a", "ж"], "a cat")]
        body = {"q": "<p>a <b>ж</b></p>", "source": "en", "target": "de", "format": "html"}
        answers.append(requests.post(f"{address}/translate", json=body))
    assert [answer.headers.get("X-Unknown-Tokens") for answer in answers] == ["2", None, "1"]


def test_texts_of_a_client_that_goes_away_are_not_decoded():
    started, event, decoded = threading.Event(), threading.Event(), []

    def change(text):
        decoded.append(text)
        started.set()
        return event.wait(20) and text.upper()

    service = upper_service(identity_generator(change))
    with running(service) as address, concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(translate, address, "a")
        started.wait(9)
        with pytest.raises(requests.exceptions.Timeout):
            requests.post(address, json={"inputs": ["b"] * 50}, timeout=0.5)
        assert service.batcher.num_waiting == 50
        # The server hears of the closed connection.
        time.sleep(0.3)
        event.set()
        assert first.result().ok and translate(address, "c").ok
    assert decoded == ["a", "c"]


def test_stream_has_a_piece_for_each_sentence():
    service = upper_service()

    async def collect():
        query = Query(["  One cat. Two dogs.\n\n- a bird"])
        return [piece async for piece in stream_target(service, service.find_model(None), query)]

    pieces = ["  ONE CAT. ", "TWO DOGS.\n\n- ", "A BIRD"]
    assert asyncio.run(collect()) == [*((piece, None) for piece in pieces), ("", "stop")]
    assert service.num_requests == 0
    service.batcher.close()


def test_alignments_are_computed_while_nothing_is_decoded(monkeypatch):
    service, states, align = upper_service(tiny_generator()), [], TextDecoder._align
    batcher = service.batcher
    monkeypatch.setattr(
        TextDecoder, "_align", lambda *a: states.append((len(batcher._calls), len(batcher._running))) or align(*a)
    )
    with running(service) as address:
        body = {"q": "<b>the cat</b> sleeps", "source": "en", "target": "de", "format": "html"}
        assert post(address, "/translate", json=body).ok
    assert states == [(1, 0)]


def test_failure_is_one_failed_request_without_its_text_in_the_log(caplog):
    def fail(text):
        raise RuntimeError(f"cannot decode {text}")

    bodies = {"/": {"inputs": "secret"}, "/translate": {"q": "secret", "source": "en", "target": "de"}}
    bodies["/v2/translate"] = {"text": ["secret"], "target_lang": "DE"}
    bodies["/v1/completions"] = {"model": "en-de", "prompt": "secret"}
    with running(upper_service(identity_generator(fail))) as address, caplog.at_level(logging.INFO):
        answers = [post(address, path, json=body) for path, body in bodies.items()]
        malformed = [post(address, path, data="{") for path in bodies]
        assert requests.get(address + "/health", timeout=9).status_code == 200
    assert {answer.status_code for answer in answers} == {500}
    assert {answer.status_code for answer in malformed} == {400}
    for replies in (answers, malformed):
        assert [next(iter(answer.json())) for answer in replies] == ["error", "error", "message", "error"]
    assert malformed[-1].json()["error"]["type"] == "invalid_request_error"
    assert "/translate failed: RuntimeError." in caplog.messages
    assert "secret" not in caplog.text and "secret" not in "".join(answer.text for answer in answers)


def test_no_text_is_in_logs_or_metrics(caplog):
    with caplog.at_level(logging.DEBUG), running(upper_service()) as address:
        assert translate(address, SECRET).json()[0]["translation_text"] == SECRET.upper()
        post(address, data=f'{{"inputs": "{SECRET}'.encode())
        post(address, f"/{SECRET}")
        post(address, json={"inputs": "a", "parameters": {SECRET: 1}})
        metrics = requests.get(f"{address}/metrics", timeout=9).text
    own = [record.getMessage() for record in caplog.records if record.name.startswith("metaphrase")]
    assert any("route=/ status=200" in message for message in own)
    assert not any(SECRET.lower() in message.lower() for message in [*own, metrics])
    for status, count in ((200, 1), (400, 2)):
        assert f'metaphrase_requests_total{{route="/",status="{status}"}} {count}.0' in metrics
    assert "metaphrase_sentences_total 1.0" in metrics


def test_other_origins_are_allowed_only_if_named():
    origin = {"Origin": "https://example.org"}
    for origins, expected in ((), None), (["https://example.org"], "https://example.org"):
        with running(upper_service(), cors_origins=origins) as address:
            answer = requests.get(f"{address}/health", headers=origin, timeout=9)
            assert answer.headers.get("Access-Control-Allow-Origin") == expected


def test_end_of_the_server_answers_accepted_requests():
    started = threading.Event()
    generator = identity_generator(lambda text: started.set() or time.sleep(0.5) or text.upper())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with running(upper_service(generator)) as address:
            request = pool.submit(translate, address, "a")
            started.wait()
        assert request.result().json()[0]["translation_text"] == "A"


THREADS = [(None, 1, 1, 1), ("cpu", 2, 2, 1), ("cpu", 16, 4, 4), ("cuda", 16, 1, 16)]


@pytest.mark.parametrize(("device", "num_threads", "num_batches", "num_threads_of_each"), THREADS)
def test_threads_are_divided_among_batches(device, num_threads, num_batches, num_threads_of_each, monkeypatch):
    chosen = [num_threads]
    monkeypatch.setattr("torch.get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    assert serve.divide_threads(device) == num_batches
    assert chosen[-1] == num_threads_of_each
