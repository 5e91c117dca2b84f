"""Tests of the models of a server: names, languages, tasks, and the languages of each request."""

import json
import time

import pytest
from identity_engine import identity_generator
from local_server import translators
from tiny_generator import save_generator, tiny_generator
from tiny_languages import mbart_tokenizer, nllb_tokenizer

from metaphrase.inference import Generator
from metaphrase.serving import models
from metaphrase.serving.batcher import Batcher, Ticket
from metaphrase.serving.models import Pivot, ServedModel, UnknownModelError
from metaphrase.serving.service import Service
from metaphrase.storage.folders import ENSEMBLE_NAME
from metaphrase.tokenization import TokenizerPair


@pytest.fixture
def batcher():
    batcher = Batcher()
    yield batcher
    batcher.close()


def test_a_folder_of_several_models_is_served_as_their_ensemble(batcher, tmp_path):
    names = [f"seed_{seed}" for seed in (1, 2)]
    folders = [save_generator(tiny_generator(seed=seed), tmp_path / "all" / f"seed_{seed}") for seed in (1, 2)]
    (folders[0] / "recipe.yaml").write_text("source_language: en\ntarget_language: de\n", encoding="utf-8")
    path = tmp_path / "all" / ENSEMBLE_NAME
    path.write_text(json.dumps({"models": names}), encoding="utf-8")
    served = ServedModel.from_pretrained(None, str(tmp_path / "all"), batcher)
    assert served.name == "all" and served.source_languages == ["en"]
    generator, options = served.open(Ticket(time.monotonic() + 60), None, None)
    texts = ["the cat", "a dog sleeps"]
    alone = Generator.from_pretrained(folders)
    assert generator.generate(texts, **options) == alone.generate(texts)
    for damaged in ('{"models": "seed_1"}', '{"models": [1]}'):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ValueError, match=r"`models` in '.*ensemble.json' must be a list of folders"):
            ServedModel.from_pretrained(None, str(tmp_path / "all"), batcher)


FOLDERS = [(None, "English", "German", ([], [])), (None, "en", "en", (["en"], ["en"])), (None, None, None, ([], []))]
FOLDERS += [(name, "en", "de", (["fr"], ["en"])) for name in ("fr-en", "fra_eng")]
FOLDERS += [(name, "en", "de", (["en"], ["de"])) for name in ("old-new", "en-de-fr")]


@pytest.mark.parametrize(("name", "source", "target", "languages"), FOLDERS)
def test_languages_and_task_of_a_folder(name, source, target, languages, batcher, tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    if source is not None:
        recipe = f"source_language: {source}\ntarget_language: {target}\n"
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    model = ServedModel.from_pretrained(name, str(folder), batcher)
    assert (model.source_languages, model.target_languages) == languages
    assert (model.name, model.task) == ((name, "translation") if name else ("model", "text2text-generation"))


def test_each_request_has_its_own_languages(batcher, monkeypatch):
    tokenizer = nllb_tokenizer()
    generator = Generator(tiny_generator().model, TokenizerPair(tokenizer, tokenizer))
    model = ServedModel("all", generator, batcher, languages=None, task="translation")
    assert sorted(model.source_languages) == sorted(model.target_languages) == ["de", "en", "ro"]
    ticket = Ticket(time.monotonic() + 60)
    (german, to_german), (roman, to_roman) = (model.open(ticket, "en", code) for code in ("de", "ron_Latn"))
    ids = tokenizer.convert_tokens_to_ids(["deu_Latn", "ron_Latn"])
    assert [to_german, to_roman] == [{"forced_bos_token_id": index} for index in ids]
    assert german.tokenizers.source.src_lang == "eng_Latn" and german.tokenizers is not roman.tokenizers
    # A pair of languages has one pair of tokenizers, so that its requests share batches.
    assert model.open(ticket, "EN", "DE")[0].tokenizers is german.tokenizers
    monkeypatch.setattr(models, "_MOST_VARIANTS", 1)
    assert model.open(ticket, "de", "en")[0].tokenizers.source.src_lang == "deu_Latn" and len(model._variants) == 2
    with pytest.raises(UnknownModelError, match="must know the language 'fr'"):
        model.open(ticket, "fr", "de")


def test_language_of_another_model_is_refused():
    service = translators(dict.fromkeys(("en-de", "de-en"), identity_generator()))
    first, second = service.models.values()
    assert service.find_model(None) is service.find_model("en-de") is service.find_translator("en", "DE") is first
    assert service.find_translator(None, "en-US") is second
    for find in (lambda: service.find_model("other"), lambda: service.find_translator("en", "fr")):
        with pytest.raises(UnknownModelError):
            find()
    with pytest.raises(UnknownModelError, match="must know the language 'fr'"):
        first.open(Ticket(time.monotonic() + 60), "fr", "de")
    with pytest.raises(ValueError, match="a name of its own, got en-de, en-de"):
        Service([first, first], service.batcher)
    service.batcher.close()


def test_pairs_of_two_models():
    def serve(*names):
        service = translators(dict.fromkeys(names, identity_generator()))
        service.batcher.close()
        return service

    def find(service, *pair):
        route = service.find_translator(*pair)
        return [route.first.name, route.second.name] if isinstance(route, Pivot) else route.name

    # English comes first, then the order of the models.
    service = serve("de-it", "it-fr", "de-es", "es-fr", "de-en", "en-fr")
    assert find(service, "de-DE", "fr") == ["de-en", "en-fr"]
    assert [*service.routes["de"]] == ["it", "es", "en", "fr"] and [*service.routes["it"]] == ["fr"]
    assert find(serve("de-es", "de-it", "it-fr", "es-fr"), "de", "fr") == ["de-es", "es-fr"]
    assert find(serve("de-en", "en-fr", "de-fr"), "de", "fr") == "de-fr"
    # No model goes back to the source, and three in a row are none.
    service = serve("de-en", "en-de", "fr-de")
    routes = {source: [*row] for source, row in service.routes.items()}
    assert routes == {"de": ["en"], "en": ["de"], "fr": ["de", "en"]}
    for pair in (("de", "de"), ("en", "en"), ("en", "fr"), (None, "fr")):
        with pytest.raises(UnknownModelError):
            service.find_translator(*pair)


def test_codes_and_names_of_languages():
    assert [models.base_code(code) for code in ("EN-US", "eng_Latn", "pt_XX", "tyv")] == ["en", "en", "pt", "tyv"]
    assert models.name_of("deu_Latn") == "German" and models.name_of("xyz") == "xyz"
    assert models.codes_of_tokenizer(mbart_tokenizer()) == {"en": "en_XX", "de": "de_DE", "ro": "ro_RO"}
    # The first script by alphabet stands for the language.
    assert models.codes_of_tokenizer(nllb_tokenizer(["zho_Hant", "zho_Hans"])) == {"zh": "zho_Hans"}
