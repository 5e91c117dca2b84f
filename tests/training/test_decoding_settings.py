"""Decoding settings: those of a base model cannot stop a checkpoint, and those of a recipe are checked at the entrance."""

import pytest
from small_experiments import make_recipe, train
from tiny_generator import save_generator, tiny_generator
from transformers import GenerationConfig

from metaphrase.training.experiment import Experiment

FEW = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
BEAMS = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}


@pytest.fixture
def base(tmp_path):
    """A folder with a tiny model, and a function that gives it generation settings."""
    folder = save_generator(tiny_generator(), tmp_path / "base")

    def with_settings(**settings):
        config = GenerationConfig.from_pretrained(folder)
        (folder / "generation_config.json").unlink()
        for name, value in settings.items():
            setattr(config, name, value)
        config.to_json_file(folder / "generation_config.json")
        return str(folder)

    return with_settings


@pytest.mark.parametrize(
    ("inherited", "own", "left_out"),
    [
        ({**BEAMS, "no_repeat_ngram_size": 3}, {"num_beams": 1}, ("length_penalty 2.0", "early_stopping True")),
        ({"temperature": 0.3, "top_k": 7}, {}, ("temperature 0.3", "top_k 7")),
        ({"output_scores": True, "penalty_alpha": 0.6}, {}, ("output_scores True", "penalty_alpha 0.6")),
    ],
    ids=str,
)
def test_settings_of_a_base_that_do_not_apply_are_left_out(inherited, own, left_out, base, data, tmp_path, caplog):
    recipe = make_recipe(data, tmp_path / "run", **FEW, **own, model_name_or_path=base(**inherited))
    Experiment(recipe).train()
    assert all(f"{setting}" in caplog.text for setting in left_out)
    saved = GenerationConfig.from_pretrained(tmp_path / "run")
    assert all(getattr(saved, setting.split()[0]) is None for setting in left_out)
    assert saved.no_repeat_ngram_size == inherited.get("no_repeat_ngram_size")
    saved.validate(strict=True)


@pytest.mark.parametrize(
    ("inherited", "own"),
    [
        ({**BEAMS, "do_sample": False}, {"length_penalty": 1.5}),
        ({"do_sample": True, "num_return_sequences": 3}, {}),
        ({}, {"repetition_penalty": 2}),
    ],
    ids=str,
)
def test_settings_of_a_base_that_apply_stay(inherited, own, base, data, tmp_path, caplog):
    experiment = Experiment(make_recipe(data, tmp_path / "run", **FEW, model_name_or_path=base(**inherited), **own))
    experiment.corpus.load()
    config = experiment.make_model(experiment.make_tokenizers(), with_weights=False).generation_config
    assert config.to_dict().items() >= (inherited | own).items()
    assert "have no effect" not in caplog.text
    # transformers refuses an integer at the first decoding.
    assert isinstance(config.repetition_penalty, float | None)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_length_penalty_needs_beams(is_new, base, data, tmp_path):
    fields = {"length_penalty": 2.0} | ({} if is_new else {"model_name_or_path": base()})
    with pytest.raises(ValueError, match=r"`length_penalty` must .*`num_beams`"):
        train(data, tmp_path / "run", **FEW, **fields)


@pytest.mark.parametrize("given", [True, False])
def test_the_recipes_length_goes_over_that_of_the_base(given, base, data, tmp_path, caplog):
    fields = FEW | {"generation_max_length": 3 if given else None, "model_name_or_path": base(max_new_tokens=5)}
    train(data, tmp_path / "run", **fields)
    saved = GenerationConfig.from_pretrained(tmp_path / "run")
    assert (saved.max_length, saved.max_new_tokens) == ((3, None) if given else (257, 5))
    assert f"met the length limit ({2 if given else 5}) before their end" in caplog.text
