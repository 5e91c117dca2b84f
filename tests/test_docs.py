"""Tests of README and docs/: Python blocks run, commands run or parse, links lead somewhere, recipes load."""

import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import uvicorn
import yaml
from huggingface_hub import constants
from local_server import demo_service, running
from marian_models import write_model, write_shortlist
from source_files import ROOT, SOURCES
from subcommands import execute
from tiny_generator import save_generator, tiny_generator, tiny_pair
from tiny_languages import nllb_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from metaphrase.conversion import adapt, convert
from metaphrase.conversion.ctranslate2 import export_ctranslate2
from metaphrase.conversion.families import FAMILIES
from metaphrase.demo.corpus import write_demo_corpus
from metaphrase.filtering.alignment import make_vocabulary_map
from metaphrase.inference import Generator
from metaphrase.scripts import serve
from metaphrase.scripts.parsers import SUBCOMMANDS
from metaphrase.storage.folders import ENSEMBLE_NAME, VOCABULARY_MAP_NAME
from metaphrase.training.recipe.fields import OWN_FIELDS
from metaphrase.training.recipe.recipe import load_recipe

PATHS = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks" / "README.md")
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
# tests/test_life.py runs the code of these pages.
LIFE = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/life/*.md")}
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))
BLOCKS = [block for page in PAGES.values() for block in re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL)]
CODE = list(dict.fromkeys(text for language, text in BLOCKS if language == "python"))
LINES = (line for language, text in BLOCKS if language == "bash" for line in text.splitlines())
# tests/test_clusters.py checks the task of SkyPilot.
RECIPES = [text for language, text in BLOCKS if language == "yaml" and "num_nodes:" not in text]
# Each command once, also if several pages show it.
COMMANDS = list(dict.fromkeys(line.partition("  #")[0].strip() for line in LINES if line.startswith("metaphrase ")))
# Commands that train take too long, and a server never ends: only their arguments are tested.
TRAINING = ("train", "tune", "demo")
LONG = (*TRAINING, "serve")


def save_model(folder, model_type, auto_class=AutoModelForSeq2SeqLM, **fields):
    auto_class.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(folder)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with the files that the pages assume: trained models in runs/, a recipe, texts."""
    folder = tmp_path_factory.mktemp("project")
    # More layers would make the ONNX export as slow as all other commands together.
    model = save_generator(tiny_generator(layers=1), folder / "runs" / "demo")
    names = ["demo_seed_2", "demo_small", "reverse", "text_to_text", "commands", "smol-pairs"]
    names += ["pairs_3_seeds/stages/seed_42", "g2p_3_seeds/stages/seed_42", "model", "flan-t5"]
    for name in [*names, *(f"multi30k/checkpoint-{step + 1}" for step in range(5))]:
        shutil.copytree(model, folder / "runs" / name)
    for name in ("pairs_3_seeds", "g2p_3_seeds"):
        (folder / "runs" / name / ENSEMBLE_NAME).write_text('{"models": ["stages/seed_42", "../demo"]}', "utf-8")
    student = tiny_generator(layers=1, kind="byte_bpe")
    save_generator(student, folder / "runs" / "student")
    made = make_vocabulary_map([("the cat", "eine Katze")], student.tokenizers)
    made.save(folder / "runs" / "student" / VOCABULARY_MAP_NAME, student.tokenizers)
    save_generator(tiny_generator(layers=1, kind="unigram"), folder / "runs" / "en-de")
    paths = write_demo_corpus(folder / "runs" / "demo" / "data", num_train=2000, num_validation=20, num_test=20)
    first_lines = paths["test"].read_text(encoding="utf-8").splitlines(keepends=True)[:3]
    paths["test"].write_text("".join(first_lines), encoding="utf-8")
    pair = "the cat\teine Katze\n"
    texts = dict.fromkeys(("pairs.tsv", "both.tsv", "distilled.tsv"), pair) | {"terms.tsv": "cat\tHund\n"}
    names = [f"data/g2p_2021/fre_{split}.tsv" for split in ("train", "dev", "test")]
    texts |= dict.fromkeys([*names, "runs/tasks/commands/test_systematic.tsv"], "".join(first_lines))
    texts |= {f"train.{side}": "the cat sleeps\neine Katze schläft\n" for side in ("en", "de")}
    texts |= {"greedy.txt": "ein Hund\nein Hund schläft\n", "beam.txt": "die Katze\ndie Katze schläft\n"}
    texts |= {"test.en": "a cat\na cat schläft\n", "test.de": "eine Katze\neine Katze schläft\n"}
    texts |= dict.fromkeys(("comet_greedy.txt", "comet_beam.txt"), "0.5\n0.7\n")
    texts |= dict.fromkeys(("dev.en", "a.de", "b.de", "reviews.txt", "texts.txt"), texts["test.en"])
    texts |= {"dev.es": texts["test.de"], "weights.json": '{"forward": 1, "length": 0, "backward": 1}'}
    texts |= dict.fromkeys(("dev.nbest", "test.nbest"), "0 ||| a ||| -1\n0 ||| b ||| -2\n1 ||| c ||| -1\n")
    texts |= {"my_scores.py": next(code for code in CODE if "def brackets" in code)}
    texts |= {f"mono.{side}": "eine Katze schläft\n" * 256 for side in ("de", "es")}
    texts |= {"preferences.jsonl": '{"prompt": "the cat", "chosen": "die Katze", "rejected": "der Hund"}\n'}
    texts |= {"input.txt": "the cat sleeps\na dog\n"}
    texts |= {
        "page.html": "<p>the <b>cat</b></p>\n<p>a dog</p>\n",
        "tuvan.tsv": "a cat\ta дөө\nno dolphin\tno öö\n" * 4,
    }
    texts |= {"talk.srt": "1\n00:00:01,000 --> 00:00:02,000\nthe cat sleeps\n"}
    names = ("LICENSE", "dist/transformers.min.js")
    library = [f"@huggingface/transformers/{name}" for name in names]
    library += [f"onnxruntime-web/dist/ort-wasm-simd-threaded.{suffix}" for suffix in ("mjs", "wasm")]
    texts |= {f"node_modules/{name}": "a file of npm" for name in library}
    texts |= dict.fromkeys(("my_recipe.yaml", "runs/search/recipe.yaml"), RECIPES[0])
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 37}
    save_model(folder / "models" / "t5-small", "t5", **sizes)
    judge = tiny_generator().tokenizers.source
    judge.add_tokens(["<extra_id_10>"])
    judge.save_pretrained(folder / "models" / "metricx-24")
    save_model(
        folder / "models" / "metricx-24", "mt5", **sizes | {"vocab_size": len(judge), "decoder_start_token_id": 0}
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 9, "num_attention_heads": 2}
    sizes["vocab_size"] = len(tiny_pair().source)
    save_model(folder / "models" / "SmolLM2-135M", "llama", AutoModelForCausalLM, **sizes)
    tiny_pair().source.save_pretrained(folder / "models" / "SmolLM2-135M")
    adapt(folder / "models" / "SmolLM2-135M", folder / "runs" / "smol")
    convert(folder / "models" / "t5-small", folder / "runs" / "my-t5")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    sizes |= {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("attention_heads", "ffn_dim")}
    save_model(folder / "models" / "opus-mt-en-de", "marian", **sizes, decoder_start_token_id=0)
    convert(folder / "models" / "opus-mt-en-de", folder / "runs" / "pairs")
    tiny_pair().source.save_pretrained(folder / "runs" / "pairs")
    for name, codes in {"nllb-200-distilled-600M": [], "nllb-tyv": ["tyv_Cyrl"], "rus-tyv": ["tyv_Cyrl"]}.items():
        tokenizer = nllb_tokenizer(["rus_Cyrl", "kir_Cyrl", *codes])
        tokenizer.save_pretrained(folder / "models" / name)
        fields = sizes | {"pad_token_id": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
        save_model(folder / "models" / name, "m2m_100", **fields)
    convert(folder / "models" / "rus-tyv", folder / "runs" / "rus-tyv")
    options, _ = write_model(folder / "models" / "enpt")
    size = options["dim-vocabs"][0]
    write_shortlist(folder / "models" / "enpt" / "lex.s2t.bin", size, 4, [[5]] * size)
    for name in ("enpt", "student-marian"):
        convert(folder / "models" / "enpt", folder / "runs" / name)
    return folder


def link_code(source, target):
    (os.link if source.endswith(".py") else shutil.copy2)(source, target)


@pytest.fixture
def project(template, tmp_path, monkeypatch):
    """A copy of the template, as the working directory. Settings of the process stay as they are."""
    # No command changes the code beside a model, which is most of the files.
    shutil.copytree(template, tmp_path, dirs_exist_ok=True, copy_function=link_code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metaphrase.ops.cpu_setup.prepare_cpu", lambda: None)
    return tmp_path


@pytest.mark.parametrize("name", [*PAGES, *sorted(LIFE)])
def test_links_and_paths_lead_somewhere(name):
    page = (PAGES | LIFE)[name]
    folder = (ROOT / name).parent
    for path in re.findall(r'(?:src|srcset)="([^"]*)"', page):
        assert (folder / path).is_file(), path
    for path, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page):
        assert (folder / path).exists(), path
        text = (folder / path).read_text(encoding="utf-8") if path and heading else page
        titles = [re.sub(r"[^\w\- ]", "", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
        assert not heading or heading in [title.lower().replace(" ", "-") for title in titles], f"{path}#{heading}"
    for path in re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+\.py)`", page):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("code", CODE)
def test_python_runs(code, project, capsys, monkeypatch):
    if "localhost:8000" in code:
        # Offline, Hugging Face's client refuses even this machine.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with running(demo_service()) as url:
            exec(compile(code.replace("http://localhost:8000", url), "page", "exec"), {"__name__": "page"})
        # The untrained model may write a blank.
        assert capsys.readouterr().out
        return
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    assert bool(capsys.readouterr().out.strip()) == ("print(" in code)


# These take half a minute each, and faster tests cover them.
SLOW = re.compile("--format (onnx|web)|--num_processes")
SHORT = [command for command in COMMANDS if command.split()[1] not in LONG]


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=[pytest.mark.slow] * bool(SLOW.search(command))) for command in SHORT]
)
def test_command_runs(command, project, monkeypatch, capsys):
    words, _, target = command.partition(" > ")
    words, _, source = words.partition(" < ")
    if source:
        text = (project / source.strip()).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    subcommand, *rest = shlex.split(words)[1:]
    if "letter.docx" in rest:
        document = pytest.importorskip("docx", reason="needs python-docx").Document()
        document.add_paragraph("the cat sleeps")
        document.save(str(project / "letter.docx"))
    if "--engine" in rest:
        # The pages make this folder with the command before.
        export_ctranslate2(project / rest[0].removesuffix("-ctranslate2"), project / rest[0])
    if subcommand in ("adapt", "convert"):
        # Code of a page that reads this folder needs it without the command.
        shutil.rmtree(project / rest[1], ignore_errors=True)
    if subcommand == "shortlist":
        # Commands of the page that use the map need it without this one.
        (project / "runs" / "student" / VOCABULARY_MAP_NAME).unlink()
    if subcommand in ("distill", "generate") and "--output" in rest:
        # Other commands read what this one writes.
        (project / rest[rest.index("--output") + 1]).unlink(missing_ok=True)
    execute(subcommand, rest)
    if target:
        # The untrained model may write other ends of lines.
        assert capsys.readouterr().out.count("\n") == 2


def test_new_language_becomes_a_model_that_writes_it(project, capsys):
    check, code, letters, _ = re.findall(r"```python\n(.*?)```", PAGES["docs/nllb.md"], flags=re.DOTALL)
    exec(compile(check, "page", "exec"), {})
    assert "['д', 'ө', 'ö']" in capsys.readouterr().out
    exec(compile(code, "page", "exec"), {})
    exec(compile(letters.replace('["ᠠ", "ᠡ"]', '["д", "ө", "ö"]'), "page", "exec"), {})
    tokenizer = AutoTokenizer.from_pretrained("models/nllb-tyv", tgt_lang="tyv_Cyrl")
    new, related = tokenizer.convert_tokens_to_ids(["tyv_Cyrl", "kir_Cyrl"])
    ids = tokenizer(text_target="a дөө").input_ids
    assert ids[0] == new and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a дөө"
    names = ("nllb-tyv", "nllb-200-distilled-600M")
    model, old = (AutoModelForSeq2SeqLM.from_pretrained(f"models/{name}") for name in names)
    rows, old_rows = (network.get_input_embeddings().weight for network in (model, old))
    assert rows[new].equal(old_rows[related]) and rows[: len(old_rows)].equal(old_rows)
    assert len(rows) == len(tokenizer) and model.get_output_embeddings().weight is rows

    convert("models/nllb-tyv", "runs/nllb-tyv")
    words = "tuvan.tsv --model_name_or_path runs/nllb-tyv --source_lang rus_Cyrl --target_lang tyv_Cyrl --use_cpu"
    words += " --output_dir runs/trained --max_steps 1 --learning_rate 0.1 --per_device_train_batch_size 4"
    execute(importlib.import_module("metaphrase.scripts.train"), words.split())
    generator = Generator.from_pretrained("runs/trained", device="cpu")
    assert generator.model.generation_config.forced_bos_token_id == new
    assert not generator.model.get_input_embeddings().weight[new].equal(rows[new])
    assert generator.tokenizers.encode_sources(["a"])[0][0] == tokenizer.convert_tokens_to_ids("rus_Cyrl")
    assert len(generator.generate(["a cat"], max_new_tokens=4)) == 1


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[1] in TRAINING])
def test_training_command_parses(command, project, monkeypatch):
    subcommand, *words = shlex.split(command)[1:]
    if subcommand == "demo":
        # No demo has made this folder, so it would be refused.
        shutil.rmtree(project / "runs" / "demo")
    for name in ("pairs_3_seeds", "g2p_3_seeds", "pairs"):
        # Other commands read what these runs leave.
        shutil.rmtree(project / "runs" / name)
    module = importlib.import_module(f"metaphrase.scripts.{subcommand}")
    end = Mock(side_effect=InterruptedError("parsed"))
    monkeypatch.setattr("metaphrase.choices.completion.complete", end)
    monkeypatch.setattr("metaphrase.techniques.stages.read_corpus", end)
    for name in ("Experiment", "complete", "train", "Tuning"):
        if subcommand != "train":
            monkeypatch.setattr(module, name, end, raising=False)
    with pytest.raises(InterruptedError, match="parsed"):
        execute(module, words)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[1] == "serve"])
def test_server_of_a_page_starts(command, project, monkeypatch):
    started = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: started.append(options["port"]))
    execute(serve, shlex.split(command)[2:])
    assert len(started) == 1


@pytest.mark.parametrize("text", RECIPES)
def test_recipe_of_a_page_loads(text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert all(getattr(recipe, name) is not None for name in yaml.safe_load(text))


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_recipes_load_and_name_no_folder(path):
    recipe = load_recipe(path)
    assert recipe.data_dir is None
    for value in yaml.safe_load(path.read_text(encoding="utf-8")).values():
        assert not (isinstance(value, str) and value.startswith(("/", "~", "..")))


def test_readme_is_short():
    text = PAGES["README.md"]
    assert len(text.encode()) <= 10240 and len(text.split()) <= 1200


def test_messages_of_troubleshooting_are_in_the_code():
    source = re.sub(r'"\s*\n\s*f?"', "", "".join(SOURCES.values()))
    messages = re.findall(r"^\| `(.+?)` \|", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert len(messages) > 25
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("name", REFERENCE["TEXTS"])
def test_every_text_made_from_the_code_has_a_page(name):
    assert sum(f"<!-- {name} -->" in page for page in PAGES.values()) == 1
    assert REFERENCE["TEXTS"][name]().strip()


def test_the_table_of_families_is_that_of_the_code():
    section = PAGES["docs/conversion.md"].split("## Families")[1].split("## ")[0]
    rows = dict(re.findall(r"^\|.*\| `([\w-]+)` \| (.*) \|$", section, flags=re.MULTILINE))
    assert rows.pop("model_type") == "conversion" and rows.keys() > FAMILIES.keys()
    assert all(text.startswith("both ways" if name in FAMILIES else "refused: ") for name, text in rows.items())


def test_reference_has_all_fields_subcommands_and_presets():
    fields, commands = REFERENCE["recipe_fields"](), REFERENCE["commands"]()
    assert [name for name in OWN_FIELDS if f"| `{name}` |" not in fields] == []
    assert re.findall(r"^## metaphrase (\w+)$", commands, re.MULTILINE) == list(SUBCOMMANDS)
    assert "| `--num_beams INT` |" in commands
    # `|` would end a cell.
    for text in (fields, commands):
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")} <= {3}


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    assert "max_tokens_per_batch" in (tmp_path / "recipe.html").read_text(encoding="utf-8")
