"""Decoding settings: those of a base model cannot stop a checkpoint, and those of a recipe are checked at the entrance."""

import pytest
from small_experiments import make_recipe
from tiny_generator import save_generator, tiny_generator
from transformers import GenerationConfig

from metaphrase.training.experiment import Experiment

FEW = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
BEAMS = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}


@pytest.fixture
def settled(data, tmp_path):
    """The generation settings of the model of a run, from the settings of its base and the fields of the recipe."""
    folder = save_generator(tiny_generator(), tmp_path / "base")

    def settle(inherited, **own):
        config = GenerationConfig.from_pretrained(folder)
        (folder / "generation_config.json").unlink()
        for name, value in inherited.items():
            setattr(config, name, value)
        config.to_json_file(folder / "generation_config.json")
        experiment = Experiment(make_recipe(data, tmp_path / "run", **FEW, model_name_or_path=folder, **own))
        experiment.corpus.load()
        config = experiment.make_model(experiment.make_tokenizers(), with_weights=False).generation_config
        # transformers saves it.
        config.validate(strict=True)
        return config

    return settle


@pytest.mark.parametrize(
    ("inherited", "own", "left_out"),
    [
        ({**BEAMS, "no_repeat_ngram_size": 3}, {"num_beams": 1}, ("length_penalty 2.0", "early_stopping True")),
        ({"temperature": 0.3, "top_k": 7}, {}, ("temperature 0.3", "top_k 7")),
        ({"output_scores": True, "penalty_alpha": 0.6}, {}, ("output_scores True", "penalty_alpha 0.6")),
        ({**BEAMS, "do_sample": False}, {"length_penalty": 1.5}, ()),
        ({"do_sample": True, "num_return_sequences": 3}, {}, ()),
        # transformers refuses an integer at the first decoding.
        ({}, {"repetition_penalty": 2}, ()),
    ],
    ids=str,
)
def test_settings_of_a_base_that_do_not_apply_are_left_out(inherited, own, left_out, settled, caplog):
    config = settled(inherited, **own)
    assert all(setting in caplog.text for setting in left_out) and bool(left_out) == ("have no effect" in caplog.text)
    names = {setting.split()[0] for setting in left_out}
    expected = {name: None if name in names else value for name, value in (inherited | own).items()}
    assert {name: getattr(config, name) for name in expected} == expected
    assert isinstance(config.repetition_penalty, float | None)


def test_a_length_penalty_needs_beams(settled):
    with pytest.raises(ValueError, match=r"`length_penalty` must .*`num_beams`"):
        settled({}, length_penalty=2.0)


@pytest.mark.parametrize("given", [True, False])
def test_the_recipes_length_goes_over_that_of_the_base(given, settled):
    config = settled({"max_new_tokens": 5}, generation_max_length=3 if given else None)
    assert (config.max_length, config.max_new_tokens) == ((3, None) if given else (257, 5))
