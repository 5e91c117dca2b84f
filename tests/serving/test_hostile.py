"""Malformed and hostile requests: none makes the server fail, or tell one client the text of another.

200 requests run by default. METAPHRASE_REQUESTS sets another number.
"""

import json
import os
import random
from collections import Counter

import requests
from local_server import running, upper_service

from metaphrase.serving import Limits

NUM_REQUESTS = int(os.environ.get("METAPHRASE_REQUESTS", "200"))
SECRET = "SENTENCE OF ANOTHER CLIENT"
JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
# Path and fields of a valid request.
TEMPLATES = (
    ("/", {"inputs": "a b", "parameters": {"num_beams": 2, "src_lang": "en", "tgt_lang": "de"}}),
    ("/generate", {"inputs": "a b", "parameters": {"max_new_tokens": 5, "stop": ["b"], "seed": 1}, "stream": False}),
    ("/translation", {"inputs": ["a", "b"], "parameters": {"generate_parameters": {"length_penalty": 1.0}}}),
    ("/translate", {"q": ["a", "b"], "source": "en", "target": "de", "format": "html", "alternatives": 2}),
    ("/detect", {"q": "a b"}),
    ("/v2/translate", {"text": ["a"], "target_lang": "DE", "tag_handling": "xml", "ignore_tags": ["x"]}),
    ("/v1/completions", {"model": "en-de", "prompt": ["a"], "max_tokens": 5, "n": 2, "stream": False, "stop": "b"}),
    ("/v1/chat/completions", {"model": "en-de", "messages": [{"role": "user", "content": "a"}], "stream": False}),
)
JUNK = [None, True, -1, 0, 1e308, -1e308, 10**400, float("nan"), float("inf"), "", " ", "\x00", "\ud800", "\u202e<b>"]
JUNK += ["<a <a ", "<!--" * 500, "&#" * 500, "a " * 3000, "{{" * 500, [], {}, [[]], [None], {"a": {}}, [[[[[[]]]]]]]
JUNK += [["a"] * 300, {"": ""}]


def draw_value(rng, value):
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.2:
            del changed[name]
        else:
            changed[name] = draw_value(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.5:
        return [draw_value(rng, value[0]), *value[1:]]
    return rng.choice(JUNK)


def draw_body(rng, fields):
    """Return a body and its type. Most bodies are JSON with one odd value."""
    text = json.dumps(fields if rng.random() < 0.2 else draw_value(rng, fields)).encode()
    form = "&".join(f"{name}={value}" for name, value in fields.items()) + "&%ff=%zz&" * rng.randrange(3)
    bodies = [
        text,
        text[: rng.randrange(len(text) + 1)],
        rng.randbytes(rng.randrange(200)),
        b"[" * rng.randrange(20_000),
    ]
    bodies += [form.encode(), b"--x\r\nContent-Disposition: form-data; name=q\r\n\r\na\r\n--x--"]
    [body] = rng.choices(bodies, (60, 10, 10, 5, 10, 5))
    return body, rng.choice((JSON, JSON, JSON, FORM, PARTS, "text/plain", "", "\u00e9"))


def test_hostile_requests():
    rng, statuses = random.Random(1), Counter()
    limits = Limits(max_body_kilobytes=64, max_texts=16, max_text_characters=20_000)
    with running(upper_service(limits=limits)) as address:
        assert requests.post(address, json={"inputs": SECRET.lower()}, timeout=9).json()[0]["generated_text"] == SECRET
        for number in range(NUM_REQUESTS):
            path, fields = rng.choice(TEMPLATES)
            body, kind = draw_body(rng, fields)
            answer = requests.post(address + path, body, headers={"Content-Type": kind.encode("latin-1")}, timeout=20)
            statuses[answer.status_code] += 1
            assert answer.status_code not in (500, 502), (number, path, body[:3000], answer.text[:500])
            assert SECRET not in answer.text
        assert requests.post(address, json={"inputs": "a"}, timeout=9).json()[0]["generated_text"] == "A"
        metrics = requests.get(f"{address}/metrics", timeout=9).text
    print(f"{NUM_REQUESTS} requests, by status: {dict(sorted(statuses.items()))}")
    assert statuses[200] and statuses[400]
    # Nothing waits.
    assert "metaphrase_requests_running 0.0" in metrics and "metaphrase_sentences_waiting 0.0" in metrics
