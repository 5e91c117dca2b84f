import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest
import requests
from identity_engine import identity_generator
from libretranslatepy import LibreTranslateAPI
from local_server import running, translators, upper_service

from metaphrase.serving import Limits, libretranslate
from metaphrase.serving.batcher import Batcher
from metaphrase.serving.models import ServedModel
from metaphrase.serving.service import Service
from metaphrase.texts.plan import Terms

LONG_GERMAN = "Der kleine Hund läuft durch den Garten und die Katze schläft in der Sonne."


@pytest.fixture
def client(guarded_url):
    return LibreTranslateAPI(guarded_url, api_key="right")


@pytest.fixture
def post(guarded_url):
    def send(path="/translate", **fields):
        return requests.post(guarded_url + path, json={"api_key": "right", **fields})

    return send


def error_of(call, *arguments):
    with pytest.raises(HTTPError) as error:
        call(*arguments)
    return error.value.code, json.load(io.TextIOWrapper(error.value))["error"]


def test_client_translates_and_detects_languages(client):
    assert client.translate("a small dog runs", "en", "de") == "A SMALL DOG RUNS"
    assert client.languages() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": ["en"]},
    ]
    first, second = client.detect(LONG_GERMAN)
    assert (first["language"], second["language"]) == ("de", "en")
    assert first["confidence"] > 90 and first["confidence"] + second["confidence"] == pytest.approx(100, abs=0.2)


def test_source_auto_finds_a_model_for_each_text():
    service = translators({"en-fr": identity_generator(str.upper), "de-fr": identity_generator(str.lower)})
    texts = [LONG_GERMAN, "The small dog runs through the garden, and the cat sleeps in the sun."]
    with running(service) as url:
        # Too short to tell its language, a text has that of all texts together.
        bodies = [{"q": q, "source": "auto", "target": "fr"} for q in (texts, ["OK", LONG_GERMAN])]
        answer, short = (requests.post(url + "/translate", json=body).json() for body in bodies)
    assert answer["translatedText"] == [LONG_GERMAN.lower(), texts[1].upper()]
    assert [row["language"] for row in answer["detectedLanguage"]] == ["de", "en"]
    assert all(90 < row["confidence"] <= 100 for row in answer["detectedLanguage"])
    assert short["translatedText"] == ["ok", LONG_GERMAN.lower()]


def test_two_models_translate_one_after_the_other():
    changes = {"de-en": lambda text: text + " first", "en-fr": str.upper}
    generators = {name: identity_generator(change) for name, change in changes.items()}
    service = translators(generators, glossaries={"pets": Terms(glossary={"cat": "Kater"})})
    with running(service) as url:
        fields = {"source": "de", "target": "fr"}
        answers = [
            requests.post(url + "/translate", json={"q": text, "format": text_format, **fields}).json()
            for text, text_format in (("a cat\n\na dog", "text"), ("<p>a cat</p>", "html"))
        ]
        languages = requests.get(url + "/languages").json()
        body = {"text": ["a cat"], "source_lang": "DE", "target_lang": "FR", "glossary_id": "pets"}
        refused = requests.post(url + "/v2/translate", json=body)
        metrics = requests.get(url + "/metrics").text
    assert [answer["translatedText"] for answer in answers] == ["A CAT FIRST\n\nA DOG FIRST", "<p>A CAT FIRST</p>"]
    assert languages[0]["targets"] == ["en", "fr"]
    assert refused.status_code == 400 and "A glossary needs one model" in refused.json()["message"]
    assert "metaphrase_sentences_total 6.0" in metrics


def test_answers_have_the_shape_of_the_text(post):
    languages = {"source": "en", "target": "de"}
    assert post(q="a cat", **languages).json() == {"translatedText": "A CAT"}
    assert post(q=["a cat", "a dog"], **languages).json() == {"translatedText": ["A CAT", "A DOG"]}
    # The identity has no other target, and equal ones count once.
    assert post(q="a cat", alternatives=2, **languages).json() == {"translatedText": "A CAT", "alternatives": []}
    detected = {"confidence": 100.0, "language": "en"}
    answer = post(q="a cat", source="auto", target="de").json()
    assert answer == {"translatedText": "A CAT", "detectedLanguage": detected}


def test_errors_are_those_of_libretranslate(client, guarded_url, post):
    assert error_of(client.translate, "a cat", "en", "xx") == (400, "xx is not supported")
    assert error_of(client.translate, "a cat", "de", "de")[0] == 400
    assert error_of(LibreTranslateAPI(guarded_url, api_key="wrong").translate, "a cat", "en", "de")[0] == 403
    assert error_of(LibreTranslateAPI(guarded_url).detect, "a cat")[0] == 403
    assert error_of(client.translate, "a" * 5000, "en", "de")[0] == 413
    fields = {"q": "a cat", "source": "en", "target": "de"}
    assert post(format="pdf", **fields).status_code == 400
    for key, status in (("right", 200), ("wrong", 403)):
        answer = requests.post(guarded_url + "/translate", fields, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status


def test_errors_of_a_server_without_languages_say_how_to_name_them():
    batcher = Batcher()
    model = ServedModel("all", identity_generator(), batcher, languages=None, task="translation")
    with running(Service([model], batcher)) as url:
        answer = requests.post(url + "/translate", json={"q": "a", "source": "auto", "target": "de"})
        other = requests.post(url + "/v2/translate", json={"text": ["a"], "target_lang": "DE"})
    assert answer.json()["error"] == "de is not supported: start the server with a name such as en-de=FOLDER"
    assert "start the server with a name such as en-de=FOLDER), got DE." in other.json()["message"]


def test_markup_and_alternatives_of_a_model(model_url):
    url, languages = model_url, {"source": "en", "target": "de", "api_key": "right"}
    body = {"q": "<p>the <b>cat</b></p>", "format": "html", "alternatives": 1, **languages}
    page = requests.post(url + "/translate", json=body).json()
    assert page["translatedText"].startswith("<p>") and page["translatedText"].count("</b>") == 1
    assert page["alternatives"] == []
    answer = requests.post(url + "/translate", json={"q": ["the cat"], "alternatives": 3, **languages}).json()
    [best], [others] = answer["translatedText"], answer["alternatives"]
    assert len({best, *others}) == 4


SUBTITLES = b"1\n00:00:01,000 --> 00:00:02,000\n<i>the dog</i>\n\n2\n00:00:05,000 --> 00:00:06,000\nsleeps.\n"


def upload(url, name, content, **fields):
    fields = {"source": "en", "target": "de", "api_key": "right"} | fields
    return requests.post(url + "/translate_file", data=fields, files={"file": (name, content)})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("talk.srt", SUBTITLES, SUBTITLES.upper().replace(b"I>", b"i>")),
        ("Page.HTML", b"<h1>the dog</h1>\n<p>sleeps", b"<h1>THE DOG</h1>\n<p>SLEEPS"),
        ("note.txt", "  the K\u00e4se\n\nis old".encode(), "  THE K\u00c4SE\n\nIS OLD".encode()),
    ],
)
def test_files_are_translated(name, content, expected, guarded_url):
    answer = upload(guarded_url, name, content)
    assert answer.status_code == 200
    url = answer.json()["translatedFileUrl"]
    downloaded = requests.get(url)
    assert downloaded.content == expected and "attachment" in downloaded.headers["content-disposition"]
    assert url.startswith(guarded_url + "/download_file/") and url.endswith(name[name.index(".") :].lower())


def test_the_server_keeps_the_last_files(guarded_url, monkeypatch):
    monkeypatch.setattr(libretranslate, "_MOST_FILES", 1)
    first, second = (upload(guarded_url, "note.txt", b"a cat").json()["translatedFileUrl"] for _ in range(2))
    assert (requests.get(first).status_code, requests.get(second).status_code) == (404, 200)


def test_a_file_is_admitted_and_has_a_deadline_before_it_is_read(monkeypatch):
    event, read_file = threading.Event(), libretranslate.read_file
    monkeypatch.setattr(libretranslate, "read_file", lambda *options: event.wait(9) and read_file(*options))
    with running(upper_service(limits=Limits(max_requests=1))) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(upload, url, "talk.srt", SUBTITLES)
        while "metaphrase_requests_running 1.0" not in requests.get(f"{url}/metrics", timeout=9).text:
            time.sleep(0.01)
        assert upload(url, "talk.srt", SUBTITLES).status_code == 503
        event.set()
        assert first.result().status_code == 200
    monkeypatch.setattr(libretranslate, "read_file", lambda *options: time.sleep(1.5) or read_file(*options))
    with running(upper_service(limits=Limits(timeout_seconds=1))) as url, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(upload, url, "talk.srt", SUBTITLES) for _ in range(2)]
        assert [answer.result().status_code for answer in answers] == [503, 503]


def test_a_file_has_one_language():
    service = translators({"en-fr": identity_generator(str.upper), "de-fr": identity_generator(str.lower)})
    english = "The small dog runs through the garden."
    content = SUBTITLES.replace(b"<i>the dog</i>", 2 * LONG_GERMAN.encode()).replace(b"sleeps.", english.encode())
    with running(service) as url:
        answer = upload(url, "talk.srt", content, source="auto", target="fr")
        text = requests.get(answer.json()["translatedFileUrl"]).text
    assert text.endswith(english.lower() + "\n")


def test_a_word_document_of_many_texts_is_translated(tmp_path):
    docx = pytest.importorskip("docx")
    # A file may have more texts than other requests.
    document = docx.Document()
    for number in range(200):
        document.add_paragraph(f"dog {number}")
    document.save(tmp_path / "letter.docx")
    with running(upper_service()) as url:
        answer = upload(url, "letter.docx", (tmp_path / "letter.docx").read_bytes(), source="auto")
        (tmp_path / "again.docx").write_bytes(requests.get(answer.json()["translatedFileUrl"]).content)
    texts = [paragraph.text for paragraph in docx.Document(tmp_path / "again.docx").paragraphs]
    assert texts == [f"DOG {number}" for number in range(200)]


@pytest.mark.parametrize(
    ("status", "message", "name", "content", "fields"),
    [
        (400, "A file must end in one of .txt, .html, .htm, .srt", "talk.pdf", b"%PDF", {}),
        (400, "a.docx must be a Word document, got ", "a.docx", b"PK\x03\x04", {}),
        (400, "utf-8", "note.txt", b"\xff\xfe\xff", {}),
        (400, "xx is not supported", "talk.srt", SUBTITLES, {"target": "xx"}),
        (403, "key", "talk.srt", SUBTITLES, {"api_key": "wrong"}),
        (413, "at most 4 kB", "note.txt", b"a" * 5000, {}),
    ],
)
def test_bad_files_are_refused(status, message, name, content, fields, guarded_url):
    pytest.importorskip("docx")
    answer = upload(guarded_url, name, content, **fields)
    assert answer.status_code == status and message in answer.json()["error"]


def part(disposition, content="a cat"):
    return f"--a\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{content}\r\n"


FIELDS = part("name=source", "en") + part("name=target", "de")
FORMS = [
    (200, FIELDS + part(r'name="file"; filename="a\"b \u4e2d;.txt"') + "--a--\r\n"),
    (400, "{}"),
    (400, FIELDS + part("name=file") + "--a--\r\n"),
    # RFC 7578 forbids this form of a name.
    (400, FIELDS + part("name=file; filename*=UTF-8''b.txt") + "--a--\r\n"),
    (400, part("name=source; filename=b.txt") + "--a--\r\n"),
    (400, FIELDS + 2 * part("name=file; filename=b.txt") + "--a--\r\n"),
    # There is no end.
    (400, FIELDS + "--a\r\nContent-Disposition: form-data; name=file"),
    (400, part("name=b", "") * 15_000),
]


@pytest.mark.parametrize(("status", "form"), FORMS, ids=range(len(FORMS)))
def test_forms_with_one_file_are_read_and_others_refused(status, form, model_url):
    headers = {"Content-Type": "multipart/form-data; boundary=a", "Authorization": "Bearer right"}
    answer = requests.post(model_url + "/translate_file", data=form.encode(), headers=headers, timeout=20)
    assert answer.status_code == status and (status == 200 or answer.json()["error"])
