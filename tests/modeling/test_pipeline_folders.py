"""Folders of pipelines: what is saved, and works with this package and, by the code in it, without."""

import json

import pytest
from hub_copies import report_without_package
from pipeline_models import CLASSES, NAMES, texts_of
from tiny_generator import SOURCES, tiny_pair
from transformers import AutoConfig, pipeline

from metaphrase.modeling.pipeline_support import CustomPipelines, general_task
from metaphrase.tokenization import TokenizerPair


def test_configuration_names_the_code_of_every_task(model_folders, monkeypatch):
    written = json.loads((model_folders[True] / "config.json").read_text(encoding="utf-8"))["custom_pipelines"]
    assert set(written) == set(NAMES)
    for task, entry in written.items():
        assert entry == {"impl": f"pipelines.{CLASSES[task].__name__}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    custom = CustomPipelines.with_all_tasks()
    # The registered class stands in for the code of a folder, which needs no trust then.
    assert "translation" not in custom and "translation_en_to_de" not in custom and len(custom) == 3
    monkeypatch.setattr(CustomPipelines, "registered", set())
    assert "translation" in custom and "translation_en_to_de" in custom and "ner" not in custom and None not in custom
    entry = custom["translation_en_to_de"]
    assert entry == written["translation"]
    entry["pt"] = ()
    assert custom["translation"] == written["translation"]


def test_pipelines_of_others_stay(model_folders, tmp_path):
    theirs = {"impl": "my_pipelines.Mine", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    config = AutoConfig.from_pretrained(model_folders[True])
    config.custom_pipelines = {"paraphrase": theirs, "summarization": theirs}
    config.save_pretrained(tmp_path)
    custom = AutoConfig.from_pretrained(tmp_path).custom_pipelines
    assert set(custom) == {*NAMES, "paraphrase"} and custom["paraphrase"] == custom["summarization"] == theirs
    # Their code is another than the registered one.
    assert "paraphrase" in custom and "summarization" in custom and "translation" not in custom


@pytest.mark.parametrize("joint", [True, False])
def test_pipeline_saves_all_that_it_needs(joint, model_folders, generators, tmp_path):
    pipeline("summarization", model=str(model_folders[joint])).save_pretrained(tmp_path / "saved")
    names = {path.relative_to(model_folders[joint]).as_posix() for path in model_folders[joint].rglob("*")}
    assert {path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*")} == names
    made = pipeline("translation", model=str(tmp_path / "saved"))
    assert texts_of(made(SOURCES), "translation") == generators[joint].generate(SOURCES, num_beams=4)
    # The tokenizer in memory is not marked.
    pair = generators[False].tokenizers
    pipeline("translation", model=generators[False].model, tokenizer=pair).save_pretrained(tmp_path / "pair")
    assert "target_tokenizer" not in pair.source.init_kwargs
    assert not TokenizerPair.from_pretrained(tmp_path / "pair").is_joint


# Arguments: sources and tasks in JSON, then folders of models.
RUN_PIPELINES = """
import json
import traceback
from transformers import pipeline

sources, tasks, model_folders = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
report = {}
for folder in model_folders:
    for task in tasks:
        try:
            made = pipeline(task, model=folder, trust_remote_code=True)
            assert type(made).__module__.startswith("transformers_modules."), type(made).__module__
            report[f"{folder} {task}"] = [made(sources), made(sources, batch_size=2)]
            if task == "translation":
                made.save_pretrained(folder + "/again")
                report[f"{folder} again"] = pipeline(task, model=folder + "/again", trust_remote_code=True)(sources)
        except Exception:
            report[f"{folder} {task}"] = traceback.format_exc()
try:
    pipeline("translation", model=model_folders[0], trust_remote_code=False)
except Exception:
    report["untrusted"] = traceback.format_exc()
"""


@pytest.fixture(scope="module")
def clean_report(model_folders, families, tmp_path_factory):
    """Return the results of each task without the package, by folder and task."""
    root = tmp_path_factory.mktemp("clean")
    saved = pipeline("translation_en_to_de", model=families["bart"], tokenizer=tiny_pair().source)
    saved.save_pretrained(root / "bart")
    folders = [str(model_folders[True]), str(model_folders[False]), str(root / "bart")]
    report = report_without_package(RUN_PIPELINES, root, json.dumps(SOURCES), json.dumps(list(CLASSES)), *folders)
    return dict(zip(("joint", "separate", "bart"), folders, strict=True)), report


@pytest.mark.parametrize("task", list(CLASSES))
@pytest.mark.parametrize("joint", [True, False])
def test_folder_works_without_the_package(joint, task, clean_report, generators):
    folders, report = clean_report
    expected = [
        {f"{NAMES[general_task(task)]}_text": text} for text in generators[joint].generate(SOURCES, num_beams=4)
    ]
    folder = folders["joint" if joint else "separate"]
    assert report[f"{folder} {task}"] == [expected, expected]
    if task == "translation":
        assert report[f"{folder} again"] == expected


def test_other_families_work_from_a_folder_of_a_pipeline(clean_report, families):
    folders, report = clean_report
    for task in CLASSES:
        expected = pipeline(task, model=families["bart"], tokenizer=tiny_pair().source)(SOURCES)
        assert report[f"{folders['bart']} {task}"] == [expected, expected]


def test_code_of_a_folder_asks_for_trust(clean_report):
    assert "trust_remote_code" in clean_report[1]["untrusted"].splitlines()[-1]
