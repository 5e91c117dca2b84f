import numpy as np
import pytest
import torch
from other_families import generator_of
from tiny_generator import SOURCES, TARGETS, tiny_generator, tiny_pair
from tiny_models import tiny_model

from metaphrase.inference import Generator, explain

FAMILIES = ["metaphrase", "two vocabularies", "t5", "bart", "fsmt"]
SOURCE, TARGET = SOURCES[0], TARGETS[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_a_forward_pass_and_masks_hide_padding_and_later_tokens(family):
    generator = generator_of(family)
    shown = explain(generator, SOURCE, TARGET, max_new_tokens=2)
    [source_ids], [ids] = generator.tokenizers.encode_sources([SOURCE]), generator.tokenizers.encode_targets([TARGET])
    assert (shown.source_tokens.ids, shown.target_tokens.ids) == (source_ids, ids)
    assert shown.decoder_tokens.ids == [generator.model.config.decoder_start_token_id, *ids[:-1]]
    assert (shown.target, shown.is_generated, shown.notes) == (TARGET, False, [])
    generator.model.set_attn_implementation("eager")
    inputs = {"input_ids": [source_ids], "decoder_input_ids": [shown.decoder_tokens.ids]}
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    with torch.inference_mode():
        expected = generator.model(**inputs, output_attentions=True, use_cache=False)
    for name in ("encoder", "decoder", "cross"):
        layers = expected[f"{name}_attentions"]
        np.testing.assert_allclose(shown.attentions[name], torch.cat(layers).numpy(), atol=1e-5)
    sources, targets = len(source_ids), len(ids)
    padding = np.arange(sources + 2) < sources
    assert shown.masks["encoder"].shape == (sources, sources + 2) and (shown.masks["encoder"] == padding).all()
    assert shown.masks["cross"].shape == (targets, sources + 2) and (shown.masks["cross"] == padding).all()
    assert (shown.masks["decoder"] == np.tri(targets, dtype=bool)).all()
    probabilities = expected.logits[0].softmax(-1)
    chosen = probabilities[range(len(ids)), ids]
    np.testing.assert_allclose(shown.probabilities, chosen.numpy(), atol=1e-5)
    assert shown.ranks.tolist() == (1 + (probabilities > chosen[:, None]).sum(-1)).tolist()
    scores = generator.score([SOURCE], [TARGET])[0]
    assert shown.loss == pytest.approx(-scores.mean, abs=1e-4)
    for step, row, token in zip(shown.paths["target"], probabilities, ids, strict=True):
        best = row.topk(10)
        np.testing.assert_allclose(step.probabilities, best.values.numpy(), atol=1e-5)
        assert step.choice == token and len(set(step.ids)) == 10


OTHER_BEAMS = {"num_beams": 3, "length_penalty": 0.3, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), ("metaphrase", OTHER_BEAMS)], ids=str
)
def test_searches_are_those_of_generate(family, options):
    generator = generator_of(family)
    options = {"max_new_tokens": 6, **options}
    shown = explain(generator, SOURCE, TARGET, **options)
    num_beams = options.get("num_beams", 5 if family == "fsmt" else 4)
    beams = {"num_beams": num_beams, "num_return_sequences": num_beams}
    [results] = generator.generate_ids([SOURCE], return_scores=True, **options | beams)
    tree = shown.beam_tree
    ranked = sorted((node for node in tree.nodes if node.rank), key=lambda node: node.rank)
    assert tree.num_beams == num_beams and tree.best_ids == results[0].ids
    assert len(ranked) == num_beams

    def ids_of(node):
        return [] if node is None else [*ids_of(None if node.parent is None else tree.nodes[node.parent]), node.id]

    for node, result in zip(ranked, results, strict=True):
        assert ids_of(node) == result.ids and node.state == "finished"
        assert node.score == pytest.approx(result.score, abs=1e-4)
        penalty = options.get("length_penalty", 1.0)
        assert node.total / len(result.ids) ** penalty == pytest.approx(result.score, abs=1e-4)
    # A kept hypothesis may have no continuation among the best candidates.
    assert all(tree.nodes[node.parent].state == "kept" for node in tree.nodes if node.parent is not None)
    end = generator.model.config.eos_token_id
    for step in range(tree.nodes[-1].step):
        kept = [node.total for node in tree.nodes if node.step == step and node.state == "kept"]
        # An end of sequence behind the best `num_beams` candidates is pruned, too.
        nodes = [node for node in tree.nodes if node.step == step and node.id != end]
        dropped = [node.total for node in nodes if node.state == "pruned"]
        assert 1 <= len(kept) <= num_beams and max(dropped, default=min(kept)) <= min(kept)
    # The sum of log-probabilities of a pruned hypothesis, too, is that of the model.
    pruned = next(node for node in tree.nodes if node.state == "pruned" and node.step == 1)
    assert pruned.total == pytest.approx(generator.score([SOURCE], [ids_of(pruned)])[0].total, abs=1e-4)
    assert all(len(step.ids) == 10 for steps in shown.paths.values() for step in steps)
    [[greedy]] = generator.generate_ids([SOURCE], **options | {"num_beams": 1, "length_penalty": None})
    path = shown.paths.get("greedy", shown.paths.get("target"))
    assert [step.choice for step in path] == greedy.ids


def test_there_are_no_masks_without_positions_for_padding():
    generator = generator_of("bart")
    limit = generator.model.config.max_position_embeddings
    shown = explain(generator, "a" * (limit - 1), "b" * (limit - 1), max_new_tokens=2)
    assert len(shown.source_tokens.ids) == len(shown.target_tokens.ids) == limit
    assert shown.masks == {} and "Masks: " in shown.notes[-1]


def test_positions_are_those_of_the_modules():
    kinds, pair = {}, tiny_pair()
    relative = tiny_model(position_embedding_type="relative", **pair.config_fields())
    for family in ("metaphrase", "relative", "t5", "bart", "marian"):
        generator = Generator(relative, pair) if family == "relative" else generator_of(family)
        shown = explain(generator, SOURCE, TARGET, max_new_tokens=2)
        kinds[family] = [item.kind for item in shown.positions]
        length, values = len(shown.source_tokens.ids), shown.positions[0].values
        if family == "bart":
            table = generator.model.model.encoder.embed_positions
            np.testing.assert_array_equal(values[0], table.weight[table.offset :][:length].detach().numpy())
        if family == "t5":
            attention = generator.model.encoder.block[0].layer[0].SelfAttention
            with torch.inference_mode():
                np.testing.assert_allclose(values, attention.compute_bias(length, length)[0].numpy())
        if family == "relative":
            assert values.shape == (relative.config.encoder_attention_heads, length, length)
    assert kinds.pop("relative") == ["bias"] * 2
    assert kinds == {"metaphrase": ["rotary"] * 2, "t5": ["bias"] * 2, "bart": ["added"] * 2, "marian": ["added"] * 2}


def test_stages_have_the_shapes_of_the_first_layers():
    generator = tiny_generator()
    shown = explain(generator, SOURCE, TARGET, max_new_tokens=2)
    shapes = {stage.name: stage.shape for stage in shown.stages}
    sources, targets = len(shown.source_tokens.ids), len(shown.target_tokens.ids)
    assert shapes["model.encoder.embed_tokens"] == shapes["model.encoder.layers.0"] == (1, sources, 32)
    assert shapes["model.decoder.layers.0.cross_attn.k_proj"] == (1, sources, 32)
    assert shapes["lm_head"] == (1, targets, generator.model.config.decoder_vocab_size)
    assert shown.stages[-1].name == "lm_head" and not any(".layers.1" in name for name in shapes)
    hooks = [hook for module in generator.model.modules() for hook in module._forward_hooks.values()]
    assert not any("_recording_modules" in hook.__qualname__ for hook in hooks)


def test_cuts_are_those_of_sampling():
    options = {"top_k": 3, "top_p": 0.7, "temperature": 0.5, "do_sample": True, "max_new_tokens": 4}
    shown = explain(tiny_generator(), SOURCE, TARGET, **options)
    for step in shown.paths["target"]:
        # Temperature 0.5 squares the probabilities.
        squares = np.array(step.probabilities) ** 2
        top_k = np.array(step.top_k.probabilities)
        np.testing.assert_allclose(top_k[:3], squares[:3] / squares[:3].sum(), atol=1e-5)
        assert step.top_k.size == 3 and not top_k[3:].any() and step.top_k.choice in step.ids[:3]
        top_p = np.array(step.top_p.probabilities)
        assert np.count_nonzero(top_p) == min(step.top_p.size, 10)
        assert top_p.sum() == pytest.approx(1, abs=1e-4) or step.top_p.size > 10
    again = explain(tiny_generator(), SOURCE, TARGET, **options)
    assert [step.top_p.choice for step in again.paths["target"]] == [s.top_p.choice for s in shown.paths["target"]]


def test_target_is_generated_with_the_options():
    generator = tiny_generator()
    options = {"num_beams": 4, "max_new_tokens": 8}
    shown = explain(generator, SOURCES[1], **options)
    assert shown.is_generated and shown.target == generator.generate([SOURCES[1]], **options)[0]
    assert list(shown.paths) == ["target", "greedy"]
    assert [step.beam_choice for step in shown.paths["target"]] == shown.target_tokens.ids
    first = shown.paths["greedy"][0]
    assert first.choice == first.ids[0] and first.beam_choice == shown.target_tokens.ids[0]
