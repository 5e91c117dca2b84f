import json

import pytest
from safetensors.torch import load_file
from small_runs import SMALL

from metaphrase.inference import Generator
from metaphrase.scripts import train
from metaphrase.storage.folders import members_of
from metaphrase.techniques import plain_text, stages
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe, saved_recipe

TEXTS = [f"{noun} {verb}" for noun in ("dog", "cat", "bird", "fish") for verb in ("runs", "sees", "eats", "has")]
TEXT = ("--monolingual_target", "plain.txt")


@pytest.fixture
def words(tmp_path):
    """Options of a run on pairs of a text and its letters backwards, and plain text with lines that must be left out."""
    pairs = [f"{text}\t{text[::-1]}\n" for text in TEXTS]
    (tmp_path / "train.tsv").write_text("".join(pairs[:12]), encoding="utf-8")
    (tmp_path / "test.tsv").write_text("".join(pairs[12:14]), encoding="utf-8")
    new = [f"{text[::-1]} {number}" for number, text in enumerate(TEXTS)]
    (tmp_path / "plain.txt").write_text(
        "\n".join([*new, "", new[0], TEXTS[12][::-1].upper(), "dog runs cat", "god " * 9]), encoding="utf-8"
    )
    fields = {"data_dir": tmp_path, "output_dir": tmp_path / "run", "train_file": "train.tsv", "test_file": "test.tsv"}
    fields |= {"tokenizer_kind": "char", "preset": "metaphrase-tiny", "max_steps": 4, "save_steps": 2, "seed": 5}
    fields |= {"logging_steps": 1, "per_device_train_batch_size": 4, "use_cpu": "true", "disable_tqdm": "true"}
    fields |= {"num_validation": 2, "metrics": "exact_match", "generation_max_length": 12, "choose_decoding": "false"}
    fields |= {"eval_strategy": "no", "joint_vocabulary": "true"}
    fields |= {f"model.{name}": value for name, value in SMALL.items()}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def run(words, *more):
    return train.train(load_recipe(None, [*words, *more]))


def rows(path):
    return [tuple(json.loads(line).values()) for line in path.read_text("utf-8").splitlines()]


def test_plain_text_becomes_pairs(words, tmp_path, monkeypatch):
    monkeypatch.setattr(plain_text, "_RULES", ("empty",))
    result = run(words, *TEXT)[1]
    stages = tmp_path / "run" / "stages"
    state = json.loads((stages / "state.json").read_text("utf-8"))
    assert state["data"]["pairs"] == {"test": 2, "validation": 2, "train": 10}
    left_out = {"blank": 1, "repeated": 1, "target of validation or test": 1, "other language": 1} | {
        "twice as long as all targets": 1
    }
    assert state["data"]["lines"] == left_out | {"kept": 16}
    synthetic, mixture = rows(stages / "backtranslate.jsonl"), rows(stages / "mixture.jsonl")
    assert sorted(target for _, target in synthetic) == sorted(f"{text[::-1]} {n}" for n, text in enumerate(TEXTS))
    tagged = [(f"<BT> {source}", target) for source, target in synthetic if source.strip()]
    times = state["backtranslate"]["times"]
    assert mixture == [*tagged, *times * rows(stages / "train.jsonl")] and times == max(1, round(len(tagged) / 10))
    # The sides of the first model are exchanged, and only the last one is scored on the test pairs.
    assert TokenizerPair.from_pretrained(stages / "reverse").source.tokenize("<BT>") != ["<BT>"]
    generator = Generator.from_pretrained(tmp_path / "run")
    tokenizer, settings = generator.tokenizers.source, generator.model.generation_config
    assert tokenizer.tokenize("<BT>") == ["<BT>"] == tokenizer.convert_ids_to_tokens(settings.suppress_tokens)
    assert state["reverse"]["scores"]["exact_match"]["num_examples"] == 2
    assert result["data"]["split"] == "test" and result["data"]["num_train"] == len(mixture)
    saved = saved_recipe(stages / "reverse" / "recipe.yaml")
    assert (saved.source_column, saved.target_column, saved.test_file) == ("target", "source", None)
    assert [*saved_recipe(stages / "recipe.yaml").stages] == ["reverse", "backtranslate", "model"]


def test_a_run_that_stops_in_any_stage_goes_on(words, tmp_path, monkeypatch):
    run(words, *TEXT)
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    train_all, write = Experiment.train, plain_text.write_mixture
    calls = []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) in (1, 3, 4):
            raise KeyboardInterrupt
        return (write if isinstance(arguments[1], str) else train_all)(*arguments)

    monkeypatch.setattr(Experiment, "train", stop)
    monkeypatch.setattr(plain_text, "write_mixture", stop)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(words, *TEXT, "--resume_from_checkpoint", "true")
    # The fields of the run need not be given again.
    resumed = ["--output_dir", str(tmp_path / "run"), "--data_dir", str(tmp_path), "--resume_from_checkpoint", "true"]
    run(resumed)
    assert len(calls) == 6
    for name in ("stages/mixture.jsonl", "stages/reverse/model.safetensors", "model.safetensors"):
        assert (whole / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
    with pytest.raises(ValueError, match="`monolingual_target` must stay as it was"):
        run(words, "--monolingual_target", "train.tsv", "--resume_from_checkpoint", "true")
    with pytest.raises(ValueError, match="`output_dir` must not hold a model"):
        run(words, *TEXT)


def test_too_little_time_for_the_reverse_model_leaves_the_pairs_alone(words, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stages, "_LEAST_UPDATES", 1.1)
    result = run(words, *TEXT, "--time_budget", "10m")[1]
    assert "The time held 100 % of the updates of the reverse model" in caplog.text
    assert result["data"]["num_train"] == 10 and not (tmp_path / "run" / "stages" / "mixture.jsonl").exists()


def test_reverse_model_has_the_other_tokenizers(tmp_path):
    words = ["--train_file", "a.tsv", "--monolingual_target", "b.txt", "--output_dir", str(tmp_path)]
    words += ["--tokenizer_kind", "char", "--target_tokenizer_kind", "word", "--vocab_size", "30"]
    recipe = stages._StagedRun(stages.choose_stages(load_recipe(None, words)), None, 0.0).recipe_of("reverse")
    assert (recipe.tokenizer_kind, recipe.target_tokenizer_kind, recipe.vocab_size) == ("word", "char", 30)


def test_seeds_follow_the_stages_before_them(words, tmp_path):
    result = run(words, *TEXT, "--num_seeds", "2")[1]
    members = [tmp_path / "run" / "stages" / name for name in ("seed_5", "seed_6")]
    assert members_of(tmp_path / "run") == members and result["models"].keys() == {"seed_5", "seed_6"}
    weights = [load_file(path / "model.safetensors")["model.decoder.norm.weight"] for path in members]
    assert not weights[0].equal(weights[1])


def test_a_stage_begins_with_the_weights_of_another(words, tmp_path):
    stages = (
        "{easy: {train_file: train.tsv, learning_rate: 0.01}, hard: {start: easy, train_file: test.tsv, max_steps: 1}}"
    )
    words += ["--num_validation", "0", "--stages", stages, "--learning_rate", "0", "--weight_decay", "0"]
    # A dry run knows the weights of no stage.
    experiment, _ = train.train(load_recipe(None, words), is_dry_run=True)
    assert (experiment.recipe.learning_rate, experiment.recipe.model_name_or_path) == (0.01, None)
    run(words)
    easy, hard = (
        load_file(path / "model.safetensors") for path in (tmp_path / "run" / "stages" / "easy", tmp_path / "run")
    )
    assert all(easy[name].equal(hard[name]) for name in easy)
    assert saved_recipe(tmp_path / "run" / "recipe.yaml").train_file == "test.tsv"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("{a: {start: b}}", "`stages.a.start` must be an earlier stage, got 'b'"),
        ("{a: {share: 0}}", "`stages.a.share` must be a number above 0, got 0"),
        ("{a: {output_dir: b}}", "`stages.a.output_dir` must be left out"),
        ("{a: {learning_rat: 1}}", "`learning_rat` in `stages.a`. Did you mean"),
        ("{backtranslate: {}, a: {}}", "`stages.backtranslate` must come with `monolingual_target`"),
        ("{reverse: {}}", "`stages` must end with the training of the model, got 'reverse'"),
    ],
)
def test_stages_of_another_form_are_refused(stages, message, words):
    with pytest.raises(ValueError, match=message):
        run(words, "--stages", stages)


def test_plain_text_needs_a_line_of_its_language(words, tmp_path):
    with pytest.raises(FileNotFoundError, match="`monolingual_target` must be a file"):
        run(words, "--monolingual_target", "missing.txt")
    assert not (tmp_path / "run").exists()
    (tmp_path / "plain.txt").write_text("\ndog cat bird\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"must hold the target language, .* 1 blank, 1 other language"):
        run(words, *TEXT)
    (tmp_path / "plain.txt").write_text("snur god won\n", encoding="utf-8")
    run(words, *TEXT, "--max_steps", "1")
