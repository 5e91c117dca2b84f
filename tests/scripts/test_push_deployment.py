"""Spaces and handlers of endpoints that `metaphrase push` writes, against a Hub on this machine."""

import ast
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tomllib

import pytest
from chromium import chromium, wait_for
from cli_texts import contents
from huggingface_hub import ModelCard
from pushed_folder import push_words
from source_files import ROOT
from tiny_generator import tiny_generator
from verbs import execute

from metaphrase.hub_card import upload as deployment
from metaphrase.scripts import push


def test_endpoint_handler_answers_as_an_endpoint_does(hub, folder, tmp_path):
    execute(push, push_words(folder, "--endpoint_handler"))
    [(_, _, files)] = hub.commits
    copy = tmp_path / "repository"
    for name, content in files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    spec = importlib.util.spec_from_file_location("handler", copy / "handler.py")
    handler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(handler)
    endpoint, source = handler.EndpointHandler(str(copy)), "a small dog runs"
    options = {"num_beams": 2, "max_new_tokens": 8}
    [expected] = tiny_generator(joint=False).generate([source], **options)
    assert endpoint({"inputs": source, "parameters": options}) == [{"generated_text": expected}]
    assert len(endpoint({"inputs": [source, "a cat"]})) == 2
    assert not {"handler.py", "requirements.txt"} & contents(folder).keys()


def test_requirements_of_the_hub_are_those_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = [*dependencies["dependencies"], *dependencies["optional-dependencies"]["sentencepiece"]]
    assert set(deployment.REQUIREMENTS.split()) <= set(known)


def test_space_loads_the_model_from_the_hub(hub, folder, capsys):
    (folder / "recipe.yaml").write_text(
        "source_language: en\ntarget_language: de\nsource_prefix: \"say 'x': \"\n", encoding="utf-8"
    )
    execute(
        push, push_words(folder, "--space", "--private", "--license", "mit", "--space_examples", "a cat", 'a "dog"')
    )
    (_, _, model), (branch, _, space) = hub.commits
    assert model.keys() >= {"model.safetensors"} and "app.py" not in model and branch == "main"
    assert space.keys() == {"app.py", "requirements.txt", "README.md"}
    request = hub.repositories["somebody/tiny-space"]
    assert (request["type"], request["sdk"], request["visibility"]) == ("space", "gradio", "private")
    app = ast.parse(space["app.py"])
    constants = {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): ast.literal_eval(node.value)
        for node in app.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Call)
    }
    assert constants == {
        "MODEL_ID": "somebody/tiny",
        "TASK": "translation",
        "PREFIX": "say 'x': ",
        "SOURCE_LABEL": "Source (en)",
        "TARGET_LABEL": "Target (de)",
        "EXAMPLES": ["a cat", 'a "dog"'],
        "NUM_TARGETS": 4,
    }
    assert len(space["app.py"].splitlines()) <= 60
    metadata = ModelCard(space["README.md"].decode()).data.to_dict()
    assert (metadata["sdk"], metadata["app_file"], metadata["models"]) == ("gradio", "app.py", ["somebody/tiny"])
    assert metadata["license"] == "mit"
    assert re.fullmatch(r"somebody/tiny \w{40}\nspaces/somebody/tiny-space \w{40}\n", capsys.readouterr().out)


def test_dry_run_lists_space_and_handler(hub, folder, capsys):
    execute(push, push_words(folder, "--dry_run", "--endpoint_handler", "--space", "team/page"))
    said = capsys.readouterr().out
    assert re.search(r"^ +[\d,]+  handler.py$", said, re.MULTILINE)
    assert "Space team/page: app.py, requirements.txt, README.md" in said and hub.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--space", "--revision", "other"], "`revision` must be left out with --space"),
        (["--space_examples", "a"], "`space_examples` must come with --space, got 'a' alone"),
    ],
)
def test_options_of_a_space_are_checked_first(hub, folder, options, message):
    with pytest.raises(ValueError, match=message):
        execute(push, push_words(folder, *options))
    assert hub.calls == []


@pytest.mark.parametrize("option", ["--space", "--endpoint_handler"])
def test_space_and_handler_need_the_code_of_the_pipelines(hub, folder, option):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["custom_pipelines"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=f"`{option[2:]}` must come with a model that carries its pipelines"):
        execute(push, push_words(folder, option))
    assert hub.calls == []


@pytest.mark.slow
def test_space_starts_and_answers(hub, folder, tmp_path):
    pytest.importorskip("gradio", reason="needs gradio")
    execute(push, push_words(folder, "--space", "--space_examples", "a small dog runs"))
    (tmp_path / "app.py").write_bytes(hub.commits[1][2]["app.py"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"MODEL_ID": str(folder), "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "0"}
    # The app stands alone: the model brings its code.
    command = [
        sys.executable,
        "-c",
        "import sys, runpy; sys.modules['metaphrase'] = None; runpy.run_path('app.py', run_name='__main__')",
    ]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | settings) as app, chromium() as browser:
        try:
            wait_for(lambda: is_open(port) or app.poll() is not None, 120)
            browser.get(f"http://127.0.0.1:{port}")
            wait_for(lambda: len(browser.find_elements("css selector", "textarea")) == 3, 60)
            source, target, alternatives = browser.find_elements("css selector", "textarea")
            source.send_keys("a small dog runs")
            expected = tiny_generator(joint=False).generate_n_best(
                ["a small dog runs"], num_beams=4, num_return_sequences=4
            )
            best, *others = dict.fromkeys(scored.text for [*row] in expected for scored in row)
            wait_for(lambda: target.get_attribute("value") == best, 60)
            assert alternatives.get_attribute("value").splitlines() == others
        finally:
            app.terminate()


def is_open(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
