"""Malformed and hostile requests: none makes the server fail, grow, or tell one client the text of another.

200 requests run by default. METAPHRASE_REQUESTS sets another number.
"""

import gc
import json
import os
import random
import re
import socket

import psutil
import requests
from local_server import running, upper_service

from metaphrase.serving import Limits

NUM_REQUESTS = int(os.environ.get("METAPHRASE_REQUESTS", "200"))
SECRET = "SENTENCE OF ANOTHER CLIENT"
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
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
ODD_PATHS = ("/%00", "/../etc/passwd", "/" + "a" * 5000, "*", "/v1/models/%ff", "//", "/?" + "a=b&" * 999)


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
    text = json.dumps(fields if rng.random() < 0.2 else draw_value(rng, fields))
    body = text.encode()
    kind = rng.random()
    if kind < 0.1:
        body = body[: rng.randrange(len(body) + 1)]
    elif kind < 0.2:
        body = rng.randbytes(rng.randrange(200))
    elif kind < 0.25:
        body = b"[" * rng.randrange(20_000)
    elif kind < 0.35:
        pairs = "&".join(f"{name}={value}" for name, value in fields.items())
        return FORM, (pairs + "&%ff=%zz&" * rng.randrange(3)).encode()
    elif kind < 0.4:
        return "multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name=q\r\n\r\na\r\n--x--"
    return rng.choice((JSON, JSON, JSON, FORM, "text/plain", "", "\u00e9")), body


def draw_request(rng):
    """Return the bytes of a request, and True if the connection is closed for writing behind them."""
    path, fields = rng.choice(TEMPLATES)
    if rng.random() < 0.05:
        path = rng.choice(ODD_PATHS)
    method = rng.choice(("POST",) * 40 + ("GET", "PUT", "HEAD", "OPTIONS", "\x00"))
    kind, body = draw_body(rng, fields)
    length = rng.choice((str(len(body)),) * 50 + (str(len(body) + 9), "-1", "1e3", "99999999999", "", "0"))
    headers = [("Host", "x"), ("Content-Type", kind), ("Content-Length", length)]
    headers += [("Connection", "close")] * (rng.random() < 0.9)
    odd = (("Transfer-Encoding", "chunked"), ("X", "a" * 70_000), ("Authorization", "Bearer \xff"), ("", ""))
    headers += [rng.choice(odd)] * (rng.random() < 0.1)
    head = f"{method} {path} HTTP/{rng.choice(('1.1', '1.1', '1.1', '1.0', '9.9'))}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers)
    return head.encode("latin-1", "replace") + b"\r\n" + body, rng.random() < 0.3


def send(port, data, ends):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.3)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


def test_hostile_requests():
    rng = random.Random(1)
    process = psutil.Process()
    sizes, statuses = [], {}
    limits = Limits(max_body_kilobytes=64, max_texts=16, max_text_characters=20_000)
    with running(upper_service(limits=limits)) as address:
        port = int(address.rpartition(":")[2])
        assert requests.post(address, json={"inputs": SECRET.lower()}, timeout=9).json()[0]["generated_text"] == SECRET
        for number in range(NUM_REQUESTS):
            data, ends = draw_request(rng)
            answer = send(port, data, ends)
            status = re.match(rb"HTTP/1.1 (\d+)", answer)
            name = int(status[1]) if status else 0
            statuses[name] = statuses.get(name, 0) + 1
            assert name not in (500, 502), (number, data[:3000], answer[:500])
            assert SECRET.encode() not in answer
            if number % max(1, NUM_REQUESTS // 20) == 0:
                gc.collect()
                sizes.append(process.memory_info().rss)
        assert requests.post(address, json={"inputs": "a"}, timeout=9).json()[0]["generated_text"] == "A"
        metrics = requests.get(f"{address}/metrics", timeout=9).text
    print(f"{NUM_REQUESTS} requests, by status: {dict(sorted(statuses.items()))}")
    assert statuses[200] and statuses[400]
    # Nothing waits for clients that are gone.
    assert "metaphrase_requests_running 0.0" in metrics and "metaphrase_sentences_waiting 0.0" in metrics
    assert sizes[-1] - sizes[len(sizes) // 4] < 30e6, sizes
