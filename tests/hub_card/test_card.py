import json
import re

import pytest
import torch
import yaml
from figure_files import LOG
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from tiny_generator import save_generator, tiny_generator

from metaphrase.hub_card import card, figures
from metaphrase.hub_card.card import FIGURE_NAME, MARKER, Facts, redact, renew_model_card, write_model_card
from metaphrase.hub_card.figures import draw_training_curve

SIGNATURE = "nrefs:1|case:lc|eff:no|tok:none|smooth:exp|version:2.6.0"
METRICS = {
    "scores": {
        "bleu": {"score": 41.0249, "bp": 0.999, "sys_len": 12, "ref_len": 13, "signature": SIGNATURE}
        | {"precisions": [71.0, 47.5, 34.3, 24.5]},
        "chrf++": {"score": 60.5, "signature": "nw:2"},
        "wer": {"score": 33.3},
    },
    "loss": 1.5,
    "perplexity": 4.4817,
    "num_examples": 1000,
    "generation": {"num_beams": 5},
    "data": {"name": "Multi30k | <test>", "sizes": {"train": 29000}},
}
RECIPE = """
source_language: en
target_language: de
preset: transformer-tiny
learning_rate: 5e-3
max_tokens_per_batch: 8192
train_file: [/home/somebody/private/train.en, data/train.de]
output_dir: /home/somebody/private/runs
hub_token: hf_verysecret
note: "pipe | and `tick`"
"""
CONFIG = {"model_type": "metaphrase", "encoder_layers": 4, "decoder_layers": 3, "hidden_size": 128, "dropout": 0.3}
CONFIG |= {"position_embedding_type": "learned", "max_position_embeddings": 512, "eos_token_id": 2}
CONFIG["auto_map"] = {"AutoModelForSeq2SeqLM": "modeling_metaphrase.MetaphraseForConditionalGeneration"}


STATE = {"log_history": LOG, "global_step": 30, "epoch": 3.0, "best_metric": 9.0, "best_global_step": 20}


@pytest.fixture
def full_folder(tmp_path):
    folder = tmp_path / "tiny_en-de"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    for name, content in (("metrics", METRICS), ("config", CONFIG), ("trainer_state", STATE)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    weights = {"embed": torch.zeros(100, 8, dtype=torch.bfloat16), "scale": torch.zeros(())}
    save_file(weights, folder / "model-00001-of-00002.safetensors")
    save_file({"bias": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 1, 2)]
    index = {"weight_map": dict(zip(("embed", "scale", "bias"), shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def empty_folder(tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    return folder


def section(card, heading):
    return card.text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def code_in(text):
    """Return the first block of code. All must be Python."""
    blocks = [block.split("```", 1)[0] for block in text.split("```python\n")[1:]]
    for block in blocks:
        compile(block, "card", "exec")
    return blocks[0]


def test_metadata_of_a_full_folder(full_folder):
    card = ModelCard.load(write_model_card(full_folder, Facts(license="mit", tags=["demo"]), repo_id="me/tiny"))
    data = card.data
    assert (data.language, data.license, data.library_name) == (["en", "de"], "mit", "transformers")
    assert data.pipeline_tag == "translation"
    assert data.tags == ["metaphrase", "encoder-decoder", "demo"]
    assert data.metrics == ["bleu", "chrf", "wer"]
    assert data.model_name == "tiny"
    values = {result.metric_name: result.metric_value for result in data.eval_results}
    assert values == {"BLEU": 41.0249, "chrF++": 60.5, "WER": 33.3}
    bleu = data.eval_results[0]
    assert bleu.metric_args == {"signature": SIGNATURE}
    assert (bleu.dataset_name, bleu.task_type) == ("Multi30k | <test>", "translation")
    # A name on the Hub, not that of a file.
    assert bleu.dataset_type == "custom"
    card = ModelCard.load(write_model_card(full_folder, Facts(datasets=["me/pairs"])))
    assert card.data.eval_results[0].dataset_type == "me/pairs"


def test_sections_of_a_full_folder(full_folder):
    card = ModelCard.load(write_model_card(full_folder, repo_id="me/tiny"))
    assert card.text.lstrip().startswith("# tiny\n")
    assert "trained to translate from en to de" in card.text
    scores = section(card, "Scores")
    escaped = SIGNATURE.replace("|", "\\|")
    assert f"| BLEU | 41.02 | `{escaped}` |" in scores
    assert "| WER (lower is better) | 33.30 | unknown |" in scores
    assert "71.0/47.5/34.3/24.5, brevity penalty 0.999" in scores and "lengths 12 and 13" in scores
    assert "Measured on: Multi30k \\| &lt;test&gt;" in scores
    assert "Examples: 1,000" in scores and "Perplexity: 4.482" in scores and "`num_beams` `5`" in scores
    assert "| `train_file` | `train.en`, `data/train.de` |" in section(card, "Training data")
    assert "| sizes: train | 29,000 |" in section(card, "Training data")
    procedure = section(card, "Training procedure")
    assert "30 optimizer steps, 3 epochs" in procedure
    assert "The best score of the validation pairs was 9, at optimizer step\n20." in procedure
    assert "| `learning_rate` | `0.005` |" in procedure and "| `max_tokens_per_batch` | `8192` |" in procedure
    assert "| `note` | `` pipe \\| and `tick` `` |" in procedure
    assert "train_file" not in procedure and "source_language" not in procedure
    architecture = section(card, "Architecture")
    assert "| `decoder_layers` | 3 |" in architecture and not re.search("auto_map|token_id", architecture)
    assert "- Parameters: 804\n" in card.text
    assert "inputs and outputs end at 512 tokens." in section(card, "Limits")
    assert f"]({FIGURE_NAME})" in card.text and (full_folder / FIGURE_NAME).is_file()
    (full_folder / "config.json").write_text(json.dumps(CONFIG | {"decoder_max_position_embeddings": 1024}))
    card = ModelCard.load(write_model_card(full_folder))
    assert "inputs end at 512 tokens, and outputs at 1,024." in section(card, "Limits")


def test_the_code_in_the_card_is_python_and_loads_the_repository(full_folder):
    text = ModelCard.load(write_model_card(full_folder, repo_id="me/tiny")).text
    block = code_in(text)
    assert 'model_id = "me/tiny"' in block and block.count("trust_remote_code=True") == 2
    other = text.split("```python\n")[2].split("```")[0]
    assert other.startswith("import metaphrase\n") and "trust_remote_code" not in other
    assert 'AutoModelForSeq2SeqLM.from_pretrained("me/tiny")\n' in other
    # Code of another kind is named alone.
    config = {"model_type": "other", "auto_map": {"AutoModelForSeq2SeqLM": "modeling_other.Other"}}
    (full_folder / "config.json").write_text(json.dumps(config))
    text = ModelCard.load(write_model_card(full_folder)).text
    assert text.count("from_pretrained(model_id, trust_remote_code=True)") == 2
    assert "runs the model code that is stored beside the weights.\n\n## Scores\n" in text
    assert "import metaphrase" not in text


def test_card_of_a_model_without_own_code_speaks_of_none(full_folder):
    (full_folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (full_folder / "target_tokenizer").mkdir()
    text = ModelCard.load(write_model_card(full_folder, repo_id="me/tiny")).text
    for words in ("trust_remote_code", "import metaphrase", "stored beside the weights"):
        assert words not in text
    block = code_in(text)
    assert block.count(".from_pretrained(model_id)") == 2 and "```\n\n## Scores\n" in text
    assert 'AutoTokenizer.from_pretrained(model_id, subfolder="target_tokenizer")\n' in block


@pytest.mark.parametrize(
    ("joint", "recipe", "prefix"),
    [
        (True, None, ""),
        (False, {"source_prefix": 'say "$it" \\ ä:\n'}, 'say "$it" \\ ä:\n'),
        (True, {"tasks": {"a": {"source_prefix": "to German: "}, "b": {"source_prefix": "in short: "}}}, "to German: "),
        (False, {"tasks": {"translate": {"train_file": "train.tsv"}}}, ""),
    ],
    ids=["none", "one", "tasks", "task without"],
)
def test_the_code_in_the_card_reads_and_writes_with_two_tokenizers(joint, recipe, prefix, tmp_path, capsys):
    generator = tiny_generator(joint, kind="byte" if joint else None)
    folder = save_generator(generator, tmp_path / "trained")
    if recipe:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    text = write_model_card(folder).read_text(encoding="utf-8")
    exec(code_in(text).replace('"path/to/this/folder"', repr(str(folder))), {})
    tokenizers = generator.tokenizers
    ids = generator.model.generate(torch.tensor(tokenizers.encode_sources([prefix + "Your text here."])))
    expected = tokenizers.decode_targets(ids)
    assert capsys.readouterr().out.splitlines()[-1] == str(expected)
    assert (expected != tokenizers.source.batch_decode(ids, skip_special_tokens=True)) == (not joint)
    assert expected[0] and ("target_tokenizer" in text) == (not joint)


def test_secrets_and_machine_paths_stay_out(full_folder):
    text = write_model_card(full_folder).read_text(encoding="utf-8")
    assert "hf_verysecret" not in text and "somebody" not in text
    assert "Left out as secret: `hub_token`" in text
    assert "| `output_dir` | `runs` |" in text
    assert redact(["/a/b.txt", r"C:\x\y.txt", "data/c"]) == ["b.txt", "y.txt", "data/c"]
    below_home = redact(["~/a/b.txt", r"~jane\x\y.txt", "~", "/", "a/~/b"])
    assert below_home == ["b.txt", "y.txt", "~", "/", "a/~/b"]
    texts = {"source_prefix": "/home: ", "joiner": "/@", "additional_special_tokens": ["/s"]}
    assert redact({**texts, "tasks": {"summarize": texts}}) == {**texts, "tasks": {"summarize": texts}}
    assert redact({"summarize": {"train_file": "/a/b.txt"}}) == {"summarize": {"train_file": "b.txt"}}


def test_an_empty_folder_states_what_is_unknown(empty_folder):
    card = ModelCard.load(write_model_card(empty_folder))
    expected = {"library_name": "transformers", "pipeline_tag": "text2text-generation"}
    assert card.data.to_dict() == expected | {"tags": ["metaphrase", "encoder-decoder"]}
    for line in ("Source language: unknown", "Parameters: unknown", "Licence: unknown"):
        assert line in card.text
    assert "No scores are known" in section(card, "Scores")
    assert section(card, "Training data").strip().startswith("Unknown")
    procedure = section(card, "Training procedure")
    assert "length of training is unknown" in procedure and "hyperparameters are unknown" in procedure
    assert "no `trainer_state.json`" in procedure.split("### Curves")[1]
    assert section(card, "Architecture").strip().startswith("Unknown")
    assert "quality is unknown" in section(card, "Limits")
    assert [entry.name for entry in empty_folder.iterdir()] == ["README.md"]


def test_languages_decide_the_task_and_enter_the_metadata_only_as_codes(empty_folder):
    same = ModelCard.load(write_model_card(empty_folder, Facts(source_language="en", target_language="en")))
    assert (same.data.language, same.data.pipeline_tag) == (["en"], "text2text-generation")
    named = ModelCard.load(write_model_card(empty_folder, Facts(source_language="Old Norse", target_language="no")))
    assert (named.data.language, named.data.pipeline_tag) == (["no"], "translation")
    assert "Source language: Old Norse\n" in named.text
    assert "for text, trained to translate from Old Norse to no.\n" in named.text
    unknown = ModelCard.load(write_model_card(empty_folder, Facts(task="translation")))
    assert "for text, trained to turn one text into another." in unknown.text and "None" not in unknown.text


def test_card_reads_a_recipe_as_a_run_does(empty_folder):
    (empty_folder / "recipe.yaml").write_text("source_language: en\ntarget_language: no\neval_strategy: no\n")
    card = ModelCard.load(write_model_card(empty_folder))
    assert card.data.language == ["en", "no"] and "from en to no." in card.text
    assert "| `eval_strategy` | `no` |" in section(card, "Training procedure")
    (empty_folder / "recipe.yaml").write_text("# nothing is changed\n")
    assert "hyperparameters are unknown" in write_model_card(empty_folder).read_text(encoding="utf-8")


def test_special_characters_cannot_break_the_card(empty_folder):
    title = 'A*b*_c_ <script>|`x` $summary\n---\nkey: "value'
    (empty_folder / "metrics.json").write_text(json.dumps({"scores": {"my|score": {"score": 1.0}}}))
    card = ModelCard.load(write_model_card(empty_folder, Facts(title=title)))
    heading = card.text.lstrip().split("\n")[0]
    assert heading == r'# A\*b\*\_c\_ &lt;script&gt;\|\`x\` \$summary --- key: "value'
    assert card.data.model_name == title
    assert r"| my\|score | 1.00 | unknown |" in card.text


def test_a_card_by_another_hand_is_kept(empty_folder):
    path = write_model_card(empty_folder)
    write_model_card(empty_folder, Facts(license="mit"))
    assert ModelCard.load(path).data.license == "mit"
    path.write_text("# My own words\n")
    with pytest.raises(ValueError, match="`overwrite` must be True"):
        write_model_card(empty_folder)
    assert path.read_text() == "# My own words\n"
    write_model_card(empty_folder, overwrite=True)
    assert "My own words" not in path.read_text()


def test_a_run_renews_its_card_but_not_that_of_another_hand(full_folder, caplog):
    given = {"license": "mit", "base_model": "me/base", "datasets": ["me/pairs"], "tags": ["mine"]}
    facts = Facts(**given, summary="My own summary.", source_language="fr", task="summarization")
    path = write_model_card(full_folder, facts)
    (full_folder / "metrics.json").unlink()
    assert renew_model_card(full_folder) == path
    assert "No scores are known" in path.read_text(encoding="utf-8") and not caplog.records
    card = ModelCard.load(path)
    assert "My own summary." in card.text
    assert {name: card.data[name] for name in given} == given | {"tags": ["metaphrase", "encoder-decoder", "mine"]}
    assert (card.data.language, card.data.pipeline_tag) == (["en", "de"], "translation")
    claimed = path.read_text(encoding="utf-8").replace(MARKER, "My own words.")
    path.write_text(claimed, encoding="utf-8")
    (full_folder / FIGURE_NAME).unlink()
    assert renew_model_card(full_folder) == path and path.read_text(encoding="utf-8") == claimed
    assert "README.md was made or changed by somebody and is kept." in caplog.text
    assert (full_folder / FIGURE_NAME).is_file()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.json", "{", "`metrics.json` must be readable"),
        ("recipe.yaml", "seed: 1\nseed: 2", "`recipe.yaml` must be readable.*the key `seed` occurs twice"),
        ("trainer_state.json", "7", "`trainer_state.json` must hold fields with values, got int"),
        ("model.safetensors", "damaged", "must hold whole weights, got "),
    ],
)
def test_unfit_files_are_refused(empty_folder, name, content, message):
    (empty_folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_model_card(empty_folder)
    assert not (empty_folder / "README.md").exists()


def test_an_unfit_name_is_refused(empty_folder):
    with pytest.raises(ValueError, match="a//b"):
        write_model_card(empty_folder, repo_id="a//b")


def test_parameters_are_those_that_are_loaded(full_folder):
    save_file({"old": torch.zeros(5)}, full_folder / "model_old.safetensors")
    assert "- Parameters: 804\n" in write_model_card(full_folder).read_text(encoding="utf-8")
    (full_folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises((ValueError, OSError), match=r"model-00002-of-00002\.safetensors"):
        write_model_card(full_folder)


def test_scored_pairs_of_the_training_file_are_said_to_be_taken_out_of_it(full_folder):
    split = "validation"
    (full_folder / "recipe.yaml").write_text(f"{RECIPE}num_{split}: 50\n")
    data = {"name": "pairs.tsv", "split": split}
    (full_folder / "metrics.json").write_text(json.dumps({**METRICS, "num_examples": 50, "data": data}))
    text = write_model_card(full_folder).read_text(encoding="utf-8")
    assert "- Measured on: 50 pairs taken out of pairs.tsv before training\n" in text
    assert "| data of the scores | `pairs.tsv` |\n| split of the scores | `validation` |" in text
    assert "The scores were measured on 50 pairs taken out of pairs.tsv before training." in text


@pytest.mark.parametrize(
    ("field", "metric"),
    [("metric_for_best_model: eval_wer", "wer"), ("load_best_model_at_end: true", "loss"), ("seed: 1", None)],
)
def test_training_curve_marks_the_step_that_the_run_chose(field, metric, full_folder, monkeypatch):
    options = {}
    monkeypatch.setattr(card, "draw_training_curve", lambda *_, **given: options.update(given))
    (full_folder / "recipe.yaml").write_text(f"{RECIPE}{field}\n")
    write_model_card(full_folder)
    assert options["metric"] == metric


def test_scores_have_their_intervals_and_those_of_tasks(full_folder):
    interval = {"confidence_interval": [40.25, 42.75], "bs": 1000, "seed": "12345"}
    kinds = dict.fromkeys(("score", "rouge1", "rougeL"), 50.0)
    scores = {"bleu": METRICS["scores"]["bleu"] | interval, "rouge": kinds | interval, "wer": {"score": 33.3}}
    tasks = {"sum_up": {"scores": {"rouge": {"score": 7.0}}, "num_examples": 2000}}
    (full_folder / "metrics.json").write_text(json.dumps(METRICS | {"scores": scores, "tasks": tasks}))
    card = ModelCard.load(write_model_card(full_folder))
    values = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert values == {"BLEU": 41.0249, "ROUGE-1": 50.0, "ROUGE-L": 50.0, "WER": 33.3}
    assert card.data.metrics == ["bleu", "rouge", "wer"]
    text = card.text
    assert "| BLEU | 41.02 (95 % interval 40.25 to 42.75) |" in text
    assert "| ROUGE-1 | 50.00 |" in text and "| ROUGE-L | 50.00 (95 % interval 40.25 to 42.75) |" in text
    assert "| WER (lower is better) | 33.30 |" in text and "| sum\\_up | ROUGE-L | 7.00 | 2,000 |" in text
    assert text.count("Intervals are percentiles of sacreBLEU's bootstrap with 1,000 resamples of the test set.") == 1
    exact = {"score": 100.0, "confidence_interval": [97.57, 100.0], "bs": 1000}
    (full_folder / "metrics.json").write_text(json.dumps(METRICS | {"scores": {"exact_match": exact}}))
    text = ModelCard.load(write_model_card(full_folder)).text
    assert "| 100.00 (95 % interval 97.57 to 100.00) |" in text and "that of exact match is Wilson's." in text


@pytest.fixture
def drawn(monkeypatch):
    figures_drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path, **options: figures_drawn.append(figure) or path)
    return figures_drawn


@pytest.mark.parametrize(
    ("log", "metric", "panel", "expected"),
    [
        (LOG, None, 1, "9 BLEU at step 20"),
        ([{"step": 1, "eval_wer": 9.0}, {"step": 2, "eval_wer": 4.0}], None, 0, "4 WER at step 2"),
        ([{"step": 1, "eval_loss": 2.0}, {"step": 2, "eval_loss": 3.0}], None, 0, "2 loss at step 1"),
        ([{"step": 1, "eval_bleu": float("nan")}, {"step": 1, "loss": 2.0}], None, 0, None),
        # A resumed run may log a step twice. Only its last entry counts.
        ([{"step": 1, "eval_loss": value} for value in (2.0, 3.0)], None, 0, "3 loss at step 1"),
        ([*LOG, {"step": 20, "eval_wer": 4.0}, {"step": 30, "eval_wer": 5.0}], "wer", 1, "4 WER at step 20"),
        ([*LOG, {"step": 10, "eval_bleu": 10.0}], "loss", 0, "5 loss at step 30"),
    ],
)
def test_the_best_step_is_that_of_the_score_in_its_direction(log, metric, panel, expected, drawn):
    draw_training_curve(log, "curve.png", metric=metric)
    labels = [axes.get_legend_handles_labels()[1] for axes in drawn[0].axes]
    stars = [(index, text) for index, texts in enumerate(labels) for text in texts if text.startswith("best")]
    assert stars == [(panel, f"best: {expected}")] * bool(expected)


def test_a_log_without_a_loss_or_score_has_no_curve(drawn):
    assert draw_training_curve([{"step": 1, "epoch": 1.0}], "curve.png") is None and not drawn
