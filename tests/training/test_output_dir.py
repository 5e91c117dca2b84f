import contextlib
import json
import shutil

import pytest
from cli_texts import contents
from small_experiments import ONE_STEP, make_recipe, train

from metaphrase.training.checkpoints import with_fields_of_run
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, load_recipe

NO_FILES = dict.fromkeys(("train_file", "validation_file", "test_file"))


def test_a_folder_with_a_model_is_left_alone(data, trained, tmp_path):
    other = shutil.copytree(trained, tmp_path / "other")
    shutil.rmtree(trained / "checkpoint-1")
    before = contents(trained)
    with pytest.raises(ValueError, match=r"not hold a model, .* got .*run with model.safetensors.*--resume"):
        Experiment(make_recipe(data, trained, **ONE_STEP, joint_vocabulary="false"))
    # A model without a recipe is kept too, even if the run resumes from a checkpoint of another folder.
    (trained / "recipe.yaml").rename(tmp_path / "recipe.yaml")
    for resume in ("false", "true", str(other / "checkpoint-1")):
        with pytest.raises(ValueError, match=r"hold a model, .* with model.safetensors"):
            Experiment(make_recipe(data, trained, **ONE_STEP, resume_from_checkpoint=resume))
    (tmp_path / "recipe.yaml").rename(trained / "recipe.yaml")
    assert contents(trained) == before
    # A run that is stopped before its end leaves no model, but checkpoints.
    for name in ("model.safetensors", "config.json"):
        (other / name).unlink()
    with pytest.raises(ValueError, match=r"must not hold .* got .*other with checkpoint-1"):
        Experiment(make_recipe(data, other, **ONE_STEP))


@pytest.mark.parametrize("resume", ["false", "true"])
@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.json", "tokenizer.json"])
def test_a_file_that_no_run_has_written_is_left_alone(data, tmp_path, name, resume):
    own = tmp_path / "run" / name
    own.parent.mkdir()
    own.write_text("max_steps: 5\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"must not hold .* that the run would replace, got .*run with {name}"):
        Experiment(make_recipe(data, own.parent, resume_from_checkpoint=resume))
    assert own.read_text(encoding="utf-8") == "max_steps: 5\n"
    # A run that was stopped before its first checkpoint has left an account of its data too.
    (own.parent / "data_report.json").write_text("{}", encoding="utf-8")
    Experiment(make_recipe(data, own.parent))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_file": None}, "`eval_strategy` must come with"),
        ({"objective": "ul2", "train_text_file": "train.de", **NO_FILES}, "with `validation_text_file`, got 'steps'"),
        ({"model.hiden_size": 32}, "`hiden_size` is not a field of MetaphraseConfig"),
        ({"tokenizer_name_or_path": "./nope"}, r"`tokenizer_name_or_path` must be a folder .*got '\./nope'"),
        ({"metrics": ["blue"]}, "`metrics` must be one of bleu, .*, got 'blue'. Did you mean 'bleu'?"),
        ({"bleu_tokenize": "none", "metrics": ["chrf"]}, "must hold bleu with `bleu_tokenize`"),
        ({"average_best": 2, "prediction_loss_only": "true"}, "`metric_for_best_model` must .* loss, perplexity, got"),
        ({"data_dir": "./nope"}, r"`train_file` must be a file, got nope/train.tsv: no such file"),
    ],
)
def test_what_would_be_found_late_is_refused_before_any_work(data, tmp_path, fields, message):
    fields = {"vocab_size": None, **fields} if "tokenizer_name_or_path" in fields else fields
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


def test_a_run_without_checkpoints_can_be_repeated(data, trained, caplog):
    before = (trained / "model.safetensors").read_bytes()
    shutil.rmtree(trained / "checkpoint-1")
    # A run that is killed while it writes its model leaves no weights.
    (trained / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must not hold a model, .* got .*run with config.json"):
        Experiment(make_recipe(data, trained, **ONE_STEP))
    train(data, trained, **ONE_STEP, resume_from_checkpoint="true")
    assert "the run starts from the beginning" in caplog.text
    assert (trained / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.encoder_layers": 2}, r"`model.encoder_layers` must stay .* got 2, and 1 in .*recipe.yaml"),
        ({"vocab_size": 700}, "`vocab_size` must stay .* got 700, and 600"),
        ({"learning_rate": 1e-2}, "`learning_rate` must stay .* got 0.01, and 5e-05"),
        ({"train_file": "test.tsv"}, "`train_file` must stay .* got 'test.tsv', and 'train.tsv'"),
        ({"seed": 3, "resume_from_checkpoint": "checkpoint-1"}, "`seed` must stay .* got 3, and 42"),
        # Faults of the data may be passed over from now on, and evaluation may change.
        ({"malformed": "skip", "eval_strategy": "steps", "validation_file": "test.tsv"}, None),
    ],
    ids=str,
)
def test_a_resumed_run_keeps_what_its_checkpoint_has_settled(changed, said, data, trained, monkeypatch):
    with (trained / "recipe.yaml").open("a", encoding="utf-8") as file:
        file.write("invalid_utf8: skip\n")
    monkeypatch.chdir(trained)
    fields = ONE_STEP | {"resume_from_checkpoint": "true", "invalid_utf8": "skip"}
    recipe = make_recipe(data, trained, **fields | changed)
    with contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said):
        Experiment(recipe)


def test_a_field_that_contradicts_the_run_is_refused(tmp_path):
    run = {"num_seeds": 2, "average_best": 3, "train_file": "a.tsv"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(run), encoding="utf-8")
    resumed = {"resume_from_checkpoint": True, "objective": "ul2"}
    with pytest.raises(ValueError, match="`objective` and `train_file` must not both be given"):
        with_fields_of_run(Recipe.from_mapping(resumed, "the test"), tmp_path)
    # Another average takes the place of that of the run.
    resumed = {"resume_from_checkpoint": True, "average_last": 2}
    assert with_fields_of_run(Recipe.from_mapping(resumed, "the test"), tmp_path).average_best is None


def test_a_resumed_run_may_change_its_length_batches_and_evaluation(data, trained, tmp_path):
    # Also moved, together with its data, of which the recipe may name the old place.
    run = trained.rename(tmp_path / "moved")
    recipe = run / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert "train_file: train.tsv" in text
    recipe.write_text(text.replace("train_file: train.tsv", "train_file: /elsewhere/train.tsv"), encoding="utf-8")
    fields = {"max_steps": 3, "save_steps": 2, "logging_steps": 2, "per_device_train_batch_size": 4, "num_beams": 2}
    fields |= {"test_file": "validation.tsv", "eval_strategy": "steps", "metrics": ["chrf"]}
    result = train(data, run, **fields, resume_from_checkpoint="true")
    assert result["scores"].keys() == {"chrf"} and result["generation"]["num_beams"] == 2
    assert json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == 3
    written = load_recipe(run / "recipe.yaml")
    assert (written.max_steps, written.metrics, written.per_device_train_batch_size) == (3, ["chrf"], 4)


def test_a_run_whose_recipe_newer_rules_refuse_can_go_on(data, trained):
    with (trained / "recipe.yaml").open("a", encoding="utf-8") as file:
        file.write("max_tokens_per_batch: 300\ntrain_sampling_strategy: sequential\n")
    fields = ONE_STEP | {"max_tokens_per_batch": 300, "resume_from_checkpoint": "true"}
    with pytest.raises(ValueError, match="`train_sampling_strategy` must be left out"):
        make_recipe(data, trained, **fields, train_sampling_strategy="sequential")
    assert Experiment(make_recipe(data, trained, **fields)).checkpoint == str(trained / "checkpoint-1")
