"""Tasks of pipelines: their names, languages and settings."""

import pytest
from pipeline_models import NAMES, family_model
from tiny_generator import SOURCES, tiny_pair
from transformers import pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from metaphrase.conversion import convert
from metaphrase.inference import TranslationPipeline
from metaphrase.inference.pipelines import register_pipelines

# As T5's own.
T5_TASKS = {
    "summarization": {"prefix": "cat ", "num_beams": 2, "max_length": 6, "early_stopping": True},
    "translation_en_to_de": {"prefix": "the dog ", "num_beams": 3, "max_length": 7},
    "translation_en_to_fr": {"prefix": "two dogs ", "num_beams": 3, "max_length": 7},
}


def test_registry_knows_the_tasks():
    assert {*NAMES} <= {*PIPELINE_REGISTRY.get_supported_tasks()}
    name, implementation, languages = PIPELINE_REGISTRY.check_task("translation_en_to_de")
    assert (name, implementation["impl"], languages) == ("translation", TranslationPipeline, ("en", "de"))
    assert PIPELINE_REGISTRY.check_task("ner")[0] == "token-classification"
    before = dict(PIPELINE_REGISTRY.supported_tasks), PIPELINE_REGISTRY.check_task
    register_pipelines()
    assert (PIPELINE_REGISTRY.supported_tasks, PIPELINE_REGISTRY.check_task) == before


def test_unknown_tasks_stay_unknown(model_folders):
    with pytest.raises(
        KeyError, match="`task` must have the form translation_xx_to_yy to name languages, got 'translation_de'"
    ):
        pipeline("translation_de", model=str(model_folders[True]))
    with pytest.raises(KeyError, match="Unknown task to-translate"):
        pipeline("to-translate", model=str(model_folders[True]))
    with pytest.raises(KeyError, match="question-answering"):
        pipeline("question-answering", model=str(model_folders[True]))
    with pytest.raises(ValueError, match="default"):
        pipeline("translation_en_to_de")
    with pytest.raises(ValueError, match="default"):
        pipeline("summarization")


def test_task_gives_the_languages(pipe):
    parts = {"model": pipe.model, "tokenizer": pipe.tokenizer}
    made = pipeline("translation_en_to_de", **parts)
    assert made._preprocess_params == {"src_lang": "en", "tgt_lang": "de"}
    assert pipeline("translation", **parts)._preprocess_params == {}
    explicit = pipeline("translation_en_to_de", **parts, src_lang="a", tgt_lang="b")
    assert explicit._preprocess_params == {"src_lang": "a", "tgt_lang": "b"}
    # Where the tokenizer has no languages, they change nothing.
    assert explicit(SOURCES) == made(SOURCES, src_lang="c") == pipeline("translation", **parts)(SOURCES)


@pytest.fixture(scope="module")
def t5_with_tasks():
    return family_model("t5", task_specific_params=T5_TASKS, prefix="a cat ")


@pytest.mark.parametrize("task", ["summarization", "translation_en_to_de"])
def test_settings_of_a_task_apply(task, t5_with_tasks):
    tokenizer, settings = tiny_pair().source, dict(T5_TASKS[task])
    made = pipeline(task, model=t5_with_tasks, tokenizer=tokenizer)
    inputs = tokenizer([settings.pop("prefix") + SOURCES[0]], return_tensors="pt", return_token_type_ids=False)
    expected = t5_with_tasks.generate(**inputs.to(made.device), **settings)
    [result] = made(SOURCES[0], return_tensors=True)
    ids = result[f"{made.return_name}_token_ids"]
    assert ids.tolist() == made._remove_padding(expected[0]).tolist() and len(ids) <= settings["max_length"]
    # They are the model's own, and stay so.
    assert t5_with_tasks.config.task_specific_params == T5_TASKS
    assert made.preprocess("a", prefix="dog ")["input_ids"].tolist() == [tokenizer("dog a")["input_ids"]]
    assert len(made(SOURCES[0], max_length=4, return_tensors=True)[0][f"{made.return_name}_token_ids"]) <= 4


def test_prefix_of_the_model_holds_where_the_task_has_none(t5_with_tasks):
    tokenizer = tiny_pair().source
    made = pipeline("text2text-generation", model=t5_with_tasks, tokenizer=tokenizer)
    assert made.preprocess("dog")["input_ids"].tolist() == [tokenizer("a cat dog")["input_ids"]]
    explicit = pipeline("text2text-generation", model=t5_with_tasks, tokenizer=tokenizer, prefix="")
    assert explicit.preprocess("dog", **explicit._preprocess_params)["input_ids"].tolist() == [
        tokenizer("dog")["input_ids"]
    ]


def test_translation_without_languages_is_the_first_of_the_model(t5_with_tasks):
    parts = {"model": t5_with_tasks, "tokenizer": tiny_pair().source}
    with pytest.warns(UserWarning, match="without languages: translation_en_to_de is used"):
        made = pipeline("translation", **parts)
    assert made.task == "translation_en_to_de" and made.prefix == "the dog "
    assert made._preprocess_params == {"src_lang": "en", "tgt_lang": "de"}
    made = pipeline("translation", **parts, src_lang="en", tgt_lang="fr")
    assert made.task == "translation_en_to_fr" and made.prefix == "two dogs "
    with pytest.raises(ValueError, match="one of translation_en_to_de, translation_en_to_fr, got 'en' and None"):
        pipeline("translation", **parts, src_lang="en")


def test_conversion_carries_the_tasks_both_ways(t5_with_tasks, tmp_path):
    t5_with_tasks.save_pretrained(tmp_path / "t5")
    tiny_pair().save_pretrained(tmp_path / "t5")
    convert(tmp_path / "t5", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", to="t5")
    results = [
        pipeline("translation_en_to_fr", model=str(tmp_path / name))(SOURCES) for name in ("t5", "ours", "again")
    ]
    assert results[0] == results[1] == results[2]
    plain = pipeline("translation_en_to_xx", model=str(tmp_path / "ours"), max_length=7, num_beams=3)
    assert plain.prefix == "a cat " and plain(SOURCES) != results[0]
