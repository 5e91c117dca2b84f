"""The folder of a run: what is there is no victim of a new run, and a resumed one goes on as it began."""

import json

import pytest
from small_experiments import ONE_STEP, make_recipe, train

from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import Recipe, load_recipe
from metaphrase.training.run_folder import with_fields_of_run

NO_FILES = dict.fromkeys(("train_file", "validation_file", "test_file"))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_with_a_model_is_left_alone(data, tmp_path):
    fields = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 1, "test_file": None, "validation_file": None}
    run, other = tmp_path / "run", tmp_path / "other"
    train(data, run, **fields)
    before = contents(run)
    with pytest.raises(ValueError, match=r"not hold a model, .* got .*run with model.safetensors.*--resume"):
        Experiment(make_recipe(data, run, **fields, joint_vocabulary="false"))
    # A model without a recipe is kept too, even if the run resumes from a checkpoint of another folder.
    train(data, other, **fields | {"save_strategy": "steps", "save_steps": 1})
    (run / "recipe.yaml").rename(tmp_path / "recipe.yaml")
    for resume in ("false", "true", str(other / "checkpoint-1")):
        with pytest.raises(ValueError, match=r"hold a model, .* with model.safetensors"):
            Experiment(make_recipe(data, run, **fields, resume_from_checkpoint=resume))
    (tmp_path / "recipe.yaml").rename(run / "recipe.yaml")
    assert contents(run) == before


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
        (
            {"validation_file": None},
            "`eval_strategy` must come with `validation_file` or `num_validation`, got 'steps'",
        ),
        ({"objective": "ul2", "train_text_file": "train.de", **NO_FILES}, "with `validation_text_file`, got 'steps'"),
        ({"model.hiden_size": 32}, "`hiden_size` is not a field of MetaphraseConfig"),
        ({"model.encoder_attention_heads": 3}, "encoder_attention_heads"),
        ({"tokenizer_name_or_path": "./nope"}, r"`tokenizer_name_or_path` must be a folder .*got '\./nope'"),
        ({"data_dir": "./nope"}, r"`train_file` must be a file that exists, got nope/"),
    ],
)
def test_what_would_be_found_late_is_refused_before_any_work(data, tmp_path, fields, message):
    fields = {"vocab_size": None, **fields} if "tokenizer_name_or_path" in fields else fields
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


def test_a_run_without_checkpoints_can_be_repeated(data, tmp_path, caplog):
    fields = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 1, "test_file": None, "validation_file": None}
    train(data, tmp_path / "run", **fields)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    # A run that is killed while it writes its model leaves no weights.
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must not hold a model, .* got .*run with config.json"):
        Experiment(make_recipe(data, tmp_path / "run", **fields))
    train(data, tmp_path / "run", **fields, resume_from_checkpoint="true")
    assert "the run starts from the beginning" in caplog.text
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_that_lost_a_state_file_is_named_and_kept(data, tmp_path, name):
    run = tmp_path / "run"
    train(data, run, **ONE_STEP)
    (run / "checkpoint-1" / name).unlink()
    before, fields = contents(run), ONE_STEP | {"save_total_limit": 1, "resume_from_checkpoint": "true"}
    with pytest.raises(ValueError, match=rf"must hold a whole checkpoint .*checkpoint-1: {name} is missing\. Restore"):
        train(data, run, **fields)
    assert contents(run) == before


def test_a_resumed_run_keeps_what_its_checkpoint_has_settled(data, tmp_path):
    run = tmp_path / "run"
    fields = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "test_file": None, "freeze": ["decoder"]}
    train(data, run, **fields)
    fields |= {"resume_from_checkpoint": "true"}
    before = contents(run)
    for changed, said in (
        ({"model.encoder_layers": 2}, r"`model.encoder_layers` must stay .* got 2, and 1 in .*recipe.yaml"),
        ({"freeze": ["encoder"]}, r"`freeze` must stay .* got \['encoder'\], and \['decoder'\]"),
        ({"vocab_size": 700}, "`vocab_size` must stay .* got 700, and 600"),
        ({"learning_rate": 1e-2}, "`learning_rate` must stay .* got 0.01, and 5e-05"),
        ({"train_file": "test.tsv"}, "`train_file` must stay .* got 'test.tsv', and 'train.tsv'"),
        ({"seed": 3, "resume_from_checkpoint": str(run / "checkpoint-1")}, "`seed` must stay .* got 3, and 42"),
    ):
        with pytest.raises(ValueError, match=said):
            Experiment(make_recipe(data, run, **fields | changed))
    assert contents(run) == before


def test_a_field_that_contradicts_the_run_is_refused(tmp_path):
    stages = {"only": {"shares": {"a": 1}, "until": {"a": 1}}}
    run = {"datasets": {"a": "a.tsv"}, "stages": stages, "max_tokens_per_batch": 99, "average_best": 3}
    (tmp_path / "recipe.yaml").write_text(json.dumps(run), encoding="utf-8")
    resumed = {"resume_from_checkpoint": True, "num_train_epochs": 3.0}
    with pytest.raises(ValueError, match="`stages` and `num_train_epochs` must not both be given"):
        with_fields_of_run(Recipe.from_mapping(resumed, "the test"), tmp_path)
    # Another average takes the place of that of the run.
    resumed = {"resume_from_checkpoint": True, "average_last": 2}
    assert with_fields_of_run(Recipe.from_mapping(resumed, "the test"), tmp_path).average_best is None


def test_a_resumed_run_may_change_its_length_batches_and_evaluation(data, tmp_path):
    fields = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
    train(data, tmp_path / "first", **fields)
    # Also moved, together with its data, of which the recipe may name the old place.
    recipe = tmp_path / "first" / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert "train_file: train.tsv" in text
    recipe.write_text(text.replace("train_file: train.tsv", "train_file: /elsewhere/train.tsv"), encoding="utf-8")
    run = (tmp_path / "first").rename(tmp_path / "moved")
    fields |= {"max_steps": 3, "save_steps": 2, "logging_steps": 2, "per_device_train_batch_size": 4, "num_beams": 2}
    fields |= {"test_file": "validation.tsv", "eval_strategy": "steps", "metrics": ["chrf"]}
    result = train(data, run, **fields, resume_from_checkpoint="true")
    assert result["scores"].keys() == {"chrf"} and result["generation"]["num_beams"] == 2
    assert json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == 3
    written = load_recipe(run / "recipe.yaml")
    assert (written.max_steps, written.metrics, written.per_device_train_batch_size) == (3, ["chrf"], 4)


def test_a_checkpoint_of_elsewhere_leads_to_no_folder_with_checkpoints(data, tmp_path):
    train(data, tmp_path / "first", **ONE_STEP)
    train(data, tmp_path / "other", **ONE_STEP)
    # A run that is stopped before its end leaves no model.
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "other" / name).unlink()
    before = contents(tmp_path / "other")
    with pytest.raises(ValueError, match=r"must not hold .* got .*other with checkpoint-1"):
        checkpoint = str(tmp_path / "first" / "checkpoint-1")
        Experiment(make_recipe(data, tmp_path / "other", **ONE_STEP, resume_from_checkpoint=checkpoint))
    assert contents(tmp_path / "other") == before


def test_faults_of_the_data_may_be_passed_over_from_now_on_but_not_the_reverse(data, tmp_path):
    fields = {**ONE_STEP, "resume_from_checkpoint": "true"}
    train(data, tmp_path / "run", **fields)
    lenient = fields | {"malformed": "skip", "invalid_utf8": "skip", "max_steps": 2}
    train(data, tmp_path / "run", **lenient)
    with pytest.raises(ValueError, match=r"`invalid_utf8` must stay .* got 'error', and 'skip'"):
        Experiment(make_recipe(data, tmp_path / "run", **fields))


def test_a_run_whose_recipe_newer_rules_refuse_can_go_on(data, tmp_path):
    fields = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "test_file": None, "max_tokens_per_batch": 300}
    train(data, tmp_path / "run", **fields)
    with (tmp_path / "run" / "recipe.yaml").open("a", encoding="utf-8") as file:
        file.write("train_sampling_strategy: sequential\n")
    fields |= {"max_steps": 2, "resume_from_checkpoint": "true"}
    with pytest.raises(ValueError, match="`train_sampling_strategy` must be left out"):
        make_recipe(data, tmp_path / "run", **fields, train_sampling_strategy="sequential")
    train(data, tmp_path / "run", **fields)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
