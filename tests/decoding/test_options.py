"""Call options: however a setting is given, it means the same, and comes before the model's own."""

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator
from transformers import GenerationConfig

from metaphrase.inference import Generator
from metaphrase.inference.batches import decode


def config_of(**settings):
    return {"generation_config": GenerationConfig(**settings)}


@pytest.mark.parametrize("settings", [{"repetition_penalty": 3}, {"temperature": 2, "do_sample": True}], ids=str)
def test_an_integer_means_the_same_as_a_float(settings, generator, tmp_path):
    """transformers refuses both as integers. JSON and YAML files hold them."""
    saved = tiny_generator()
    saved.model.generation_config.update(**settings)
    loaded = Generator.from_pretrained(save_generator(saved, tmp_path / "model"))
    floats = {name: value if value is True else float(value) for name, value in settings.items()}
    results = []
    for model, options in ((generator, floats), (generator, settings), (loaded, {})):
        torch.manual_seed(1)
        results.append(model.generate(SOURCES, **options))
    assert results[1:] == results[:1] * 2


def test_the_number_of_targets_may_come_from_a_config_or_be_left_open(generator):
    several = config_of(num_beams=3, num_return_sequences=3)
    assert [len(found) for found in generator.generate_n_best([SOURCES[0], ""], **several)] == [3, 3]
    assert generator.generate([*SOURCES, ""], num_return_sequences=None) == generator.generate([*SOURCES, ""])


@pytest.mark.parametrize("wrap", [dict, config_of], ids=["arguments", "config"])
@pytest.mark.parametrize(
    ("own", "given"),
    [
        ({"max_new_tokens": 8}, {"max_length": 5}),
        ({"max_length": 5}, {"max_new_tokens": 7}),
        ({"min_new_tokens": 7}, {"min_length": 3}),
        ({"min_length": 7}, {"min_new_tokens": 2}),
    ],
    ids=str,
)
def test_a_length_that_was_given_comes_before_the_models_own(own, given, wrap, generator, sources, warned):
    def written(**options):
        return [h.ids for [h] in decode(generator.model, sources, batch_size=2, return_scores=True, **options)]

    settings = generator.model.generation_config
    if "min_length" in own | given:
        # Targets end with their second token, unless they must be longer.
        settings.eos_token_id = sorted({ids[1] for ids in written()})
    elif "max_length" in own:
        settings.max_new_tokens = None
    by_default, expected = written(**own), written(**given)
    settings.update(**own)
    assert written(**wrap(**given)) == expected != by_default == written()
    assert not warned
