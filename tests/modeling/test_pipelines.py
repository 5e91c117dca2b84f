"""Pipelines: their results, options, languages and folders, with this package and, by the code in a folder, without."""

import collections
import json

import pytest
from converted_models import bart_like, draw
from datasets import Dataset
from hub_copies import report_without_package
from huggingface_hub import constants
from pipeline_models import CLASSES, NAMES, family_model, texts_of
from tiny_generator import SOURCES, save_generator, tiny_pair
from tiny_languages import CODES, MAKERS
from tiny_models import tiny_model
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

from metaphrase.conversion import convert
from metaphrase.inference import Generator, TranslationPipeline
from metaphrase.tokenization import TokenizerPair

# Settings of tasks, in the form of T5's own configuration.
T5_TASKS = {
    "summarization": {"prefix": "cat ", "num_beams": 2, "max_length": 6, "early_stopping": True},
    "translation_en_to_de": {"prefix": "the dog ", "num_beams": 3, "max_length": 7},
}


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("task", list(CLASSES))
def test_folder_writes_what_its_generator_writes(task, joint, model_folders, generators):
    made = pipeline(task, model=str(model_folders[joint]))
    assert type(made) is CLASSES[task] and made.task == task
    assert (made.tokenizer is made.target_tokenizer) == joint
    expected = [{f"{made.return_name}_text": text} for text in generators[joint].generate(SOURCES, num_beams=4)]
    assert made(SOURCES) == made(SOURCES, batch_size=2) == expected


def test_nesting_of_results(pipe):
    first, second = SOURCES[:2]
    one, two = pipe(first), pipe(second)
    assert len(one) == 1 and set(one[0]) == {"generated_text"} and one != two
    assert pipe([first]) == one and pipe([first, second]) == [*one, *two] and pipe([]) == []
    n_best = pipe(first, num_return_sequences=3)
    assert len(n_best) == 3 and n_best[0] == one[0] and n_best[1] != n_best[0]
    assert pipe([first, second], num_return_sequences=3) == [n_best, pipe(second, num_return_sequences=3)]
    for texts in (tuple(SOURCES), Dataset.from_dict({"text": SOURCES})["text"], collections.UserList(SOURCES)):
        assert pipe(texts) == pipe(SOURCES)
    expected = [[result] for result in pipe(SOURCES)]
    assert list(pipe(text for text in SOURCES)) == expected
    assert list(pipe(KeyDataset([{"text": text} for text in SOURCES], "text"), batch_size=2)) == expected
    [tokens] = pipe(first, return_tensors=True)
    text = pipe.tokenizer.decode(tokens["generated_token_ids"], skip_special_tokens=True)
    assert text == one[0]["generated_text"]


@pytest.mark.parametrize(
    ("model", "made", "call", "length"),
    [
        ({}, {"max_length": 5}, {}, 5),
        ({"max_new_tokens": 8}, {"max_length": 5}, {"max_new_tokens": 6}, 7),
        ({"max_new_tokens": 8, "min_new_tokens": 8}, {}, {"max_length": 5, "min_length": 2}, 5),
        ({"max_new_tokens": 8}, {}, {"generation_config": GenerationConfig(max_new_tokens=3, num_beams=1)}, 4),
        ({}, {}, {"num_return_sequences": 6, "max_new_tokens": 2}, 3),
    ],
)
def test_a_length_of_the_call_overrides_any_length_elsewhere(model, made, call, length, generators, monkeypatch):
    config = GenerationConfig(decoder_start_token_id=1, pad_token_id=0, **model)
    monkeypatch.setattr(generators[True].model, "generation_config", config)
    parts = {"model": generators[True].model, "tokenizer": generators[True].tokenizers.source}
    results = pipeline("text2text-generation", **parts, **made)("the cat", return_tensors=True, **call)
    assert {len(result["generated_token_ids"]) for result in results} == {length}


def test_options_of_the_task_come_before_those_of_the_model():
    model, tokenizer = family_model("t5", task_specific_params=T5_TASKS, prefix="a cat "), tiny_pair().source
    for task in T5_TASKS:
        settings = dict(T5_TASKS[task])
        made = pipeline(task, model=model, tokenizer=tokenizer)
        text = settings.pop("prefix") + SOURCES[0]
        inputs = tokenizer([text], return_tensors="pt", return_token_type_ids=False)
        [result] = made(SOURCES[0], return_tensors=True)
        expected = model.generate(**inputs.to(made.device), **settings)[0]
        assert result[f"{made.return_name}_token_ids"].tolist() == expected.tolist()
        assert made.preprocess("a", prefix="dog ")["input_ids"].tolist() == [tokenizer("dog a")["input_ids"]]
    made = pipeline("translation", model=model, tokenizer=tokenizer, src_lang="en", tgt_lang="de")
    assert made.prefix == "the dog "
    assert pipeline("text2text-generation", model=model, tokenizer=tokenizer).prefix == "a cat "
    assert model.config.task_specific_params == T5_TASKS


def test_registry_knows_the_tasks(model_folders):
    name, implementation, languages = PIPELINE_REGISTRY.check_task("translation_en_to_de")
    assert (name, implementation["impl"], languages) == ("translation", TranslationPipeline, ("en", "de"))
    with pytest.raises(KeyError, match="translation_de"):
        pipeline("translation_de", model=str(model_folders[True]))


def test_pair_and_single_tokenizers_can_be_given(generators, model_folders):
    generator = generators[False]
    expected = [{"translation_text": text} for text in generator.generate(SOURCES, num_beams=4)]
    pair = generator.tokenizers
    for parts in ({"tokenizer": pair}, {"tokenizer": pair.source, "target_tokenizer": pair.target}):
        assert pipeline("translation", model=generator.model, **parts)(SOURCES) == expected
    assert pipeline("translation", model=generator.model, tokenizer=pair.source)(SOURCES) != expected
    with pytest.raises(ValueError, match="`tokenizer` must be given"):
        TranslationPipeline(generator.model)


def test_sources_end_with_the_end_of_sequence_and_have_positions(generators, tmp_path):
    tiny_pair().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, model_max_length=5)
    made = pipeline("translation", model=generators[True].model, tokenizer=tokenizer)
    cut = made.preprocess(SOURCES[0], truncation=True)["input_ids"]
    assert cut.shape == (1, 5) and cut[0, -1] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match=r"than the model has positions, .* Set `truncation=True`"):
        made("a" * made.model.config.position_limit)
    tokenizer.backend_tokenizer.post_processor = None
    generator = Generator(generators[True].model, TokenizerPair(tokenizer, tokenizer))
    made = pipeline("translation", model=generator.model, tokenizer=tokenizer)
    assert texts_of(made(SOURCES), "translation") == generator.generate(SOURCES, num_beams=4)
    assert made.preprocess("a cat")["input_ids"].tolist() == generator.tokenizers.encode_sources(["a cat"])
    cut = made.preprocess(SOURCES[0], truncation=True)["input_ids"]
    assert cut.shape == (1, 5) and cut[0, -1] == tokenizer.eos_token_id


def test_a_model_in_training_is_read_without_dropout(generators):
    pair = generators[True].tokenizers
    model = tiny_model(**pair.config_fields(), dropout=0.5)
    made = pipeline("translation", model=model, tokenizer=pair, max_new_tokens=8)
    expected = made(SOURCES)
    model.train()
    assert made(SOURCES) == expected


@pytest.mark.parametrize("name", list(MAKERS))
def test_languages_are_marked_and_written(name, tmp_path):
    family, make = MAKERS[name]
    tokenizer = make()
    theirs = bart_like(family, draw(family, 200), vocab_size=len(tokenizer), max_position_embeddings=40).eval()
    english, german, romanian = CODES[name]
    if name == "mbart":
        theirs.generation_config.decoder_start_token_id = tokenizer.convert_tokens_to_ids("ro_RO")
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    texts = ["the cat", "no dolphin is here", "a"]
    options = {"num_beams": 2, "max_new_tokens": 6, "suppress_tokens": [1]}
    made = pipeline("translation", model=str(tmp_path / "ours"), src_lang=english, tgt_lang=german, **options)
    written = {}
    for language in (german, romanian):
        languages = {"source_lang": english, "target_lang": language}
        generator = Generator.from_pretrained(tmp_path / "ours", device="cpu", **languages)
        written[language] = [{"translation_text": text} for text in generator.generate(texts, **options)]
        for batch_size in (1, 2):
            assert made(texts, tgt_lang=language, batch_size=batch_size) == written[language]
        # A model that was trained for one pair of languages needs no code.
        plain = pipeline("translation", model=generator.model, tokenizer=generator.tokenizers, **options)
        assert plain(texts) == written[language]
    assert written[german] != written[romanian]
    task = f"translation_{english}_to_{german}"
    assert pipeline(task, model=str(tmp_path / "ours"), **options)(texts) == written[german]
    for code in ("xx_XX", "a"):
        with pytest.raises(ValueError, match="`tgt_lang` must be a language that the tokenizer knows"):
            made("the cat", tgt_lang=code)
    with pytest.raises(ValueError, match="tgt_lang"):
        pipeline("translation", model=str(tmp_path / "ours"), src_lang=english)("the cat")


def test_target_tokenizer_is_that_of_the_revision(generators, tmp_path, monkeypatch):
    """In the cache of the Hub, `main` has another target tokenizer than the revision that the pipeline asks for."""
    repository, pinned, main = tmp_path / "models--somebody--tiny", "b" * 40, "a" * 40
    for commit in (pinned, main):
        folder = save_generator(generators[False], repository / "snapshots" / commit)
        # The cache notes which files a repository lacks.
        missing = repository / ".no_exist" / commit / "target_tokenizer" / "config.json"
        missing.parent.mkdir(parents=True)
        missing.touch()
    generators[False].tokenizers.source.save_pretrained(folder / "target_tokenizer")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(main)
    calls, load = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *_, **options: calls.append(options) or load(*_, **options)
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    made = pipeline("translation", model="somebody/tiny", revision=pinned, token="hf_of_somebody")
    assert made.target_tokenizer.get_vocab() == generators[False].tokenizers.target.get_vocab()
    assert [call["token"] for call in calls] == ["hf_of_somebody"] * 2
    # The token stays out of what is saved and pickled.
    assert "hf_of_somebody" not in str(vars(made.model.config)) + str(made.model.__dict__)
    latest = pipeline("translation", model="somebody/tiny")
    assert latest.target_tokenizer.get_vocab() == made.tokenizer.get_vocab()


@pytest.mark.parametrize("joint", [True, False])
def test_pipeline_saves_all_that_it_needs(joint, model_folders, generators, tmp_path):
    pair = generators[joint].tokenizers
    pipeline("summarization", model=generators[joint].model, tokenizer=pair).save_pretrained(tmp_path)
    assert "target_tokenizer" not in pair.source.init_kwargs
    names = {path.relative_to(model_folders[joint]).as_posix() for path in model_folders[joint].rglob("*")}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == names
    assert TokenizerPair.from_pretrained(tmp_path).is_joint == joint
    expected = generators[joint].generate(SOURCES, num_beams=4)
    assert texts_of(pipeline("translation", model=str(tmp_path))(SOURCES), "translation") == expected


# Arguments: sources and tasks in JSON, then the folder of a model.
RUN_PIPELINES = """
import json
import traceback
from transformers import pipeline

sources, tasks, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
report = {}
for task in tasks:
    try:
        made = pipeline(task, model=folder, trust_remote_code=True)
        assert type(made).__module__.startswith("transformers_modules."), type(made).__module__
        report[task] = [made(sources), made(sources, batch_size=2)]
        if task == "translation":
            made.save_pretrained(folder + "/again")
            report["again"] = pipeline(task, model=folder + "/again", trust_remote_code=True)(sources)
    except Exception:
        report[task] = traceback.format_exc()
try:
    pipeline("translation", model=folder, trust_remote_code=False)
except Exception:
    report["untrusted"] = traceback.format_exc()
"""


@pytest.mark.slow
def test_folder_works_without_the_package(model_folders, generators, tmp_path):
    folder = model_folders[False]
    report = report_without_package(RUN_PIPELINES, tmp_path, json.dumps(SOURCES), json.dumps(list(NAMES)), folder)
    assert "trust_remote_code" in report["untrusted"].splitlines()[-1]
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))["custom_pipelines"]
    assert {task: entry["impl"] for task, entry in written.items()} == {
        task: f"pipelines.{CLASSES[task].__name__}" for task in NAMES
    }
    for task, name in NAMES.items():
        expected = [{f"{name}_text": text} for text in generators[False].generate(SOURCES, num_beams=4)]
        assert report[task] == [expected, expected]
        assert task != "translation" or report["again"] == expected
