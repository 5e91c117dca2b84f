"""Tests of `DecoderState` and `BeamState`: steps are the decoder's forward pass, and follow the current weights."""

import copy
import gc
import itertools

import pytest
import torch
from tiny_models import CROSSED, DESIGNS, RECURRENT, random_batch, random_sources, tiny_model
from torch import nn
from torch.nn.utils import parametrize

from metaphrase.decoding import prepacked_weights
from metaphrase.decoding.beam_search import BeamState
from metaphrase.decoding.decoder_state import DecoderState, FirstStep
from metaphrase.decoding.fast_generation import prepared_projections

LENGTH = 19  # more than the state has room for at first


def setting(padding="left", **fields):
    """Return a model, its encoder output of three sources, their mask and targets."""
    model = tiny_model(**fields)
    batch = random_batch(model.config, target=LENGTH, padding=padding)
    with torch.inference_mode():
        encoder_output = model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    return model, encoder_output, batch["attention_mask"], batch["decoder_input_ids"]


def make_state(state_class, model, encoder_output, mask):
    with torch.inference_mode():
        return state_class(model.get_decoder(), encoder_output, mask)


def whole(model, encoder_output, mask, targets):
    """Return the output of a forward pass over all tokens."""
    with torch.inference_mode():
        return model.get_decoder()(
            targets, encoder_hidden_states=encoder_output, encoder_attention_mask=mask, use_cache=False
        ).last_hidden_state


def assert_near(outputs, expected):
    """Within 1e-4 of the largest value: without a norm at its end a stack's output is large."""
    assert outputs.shape == expected.shape
    assert (outputs - expected).abs().max() <= 1e-4 * expected.abs().max()


def step_through(state, targets):
    with torch.inference_mode():
        return torch.stack([state.step(tokens) for tokens in targets.unbind(1)], dim=1)


@pytest.mark.parametrize("kind", [DecoderState, BeamState])
@pytest.mark.parametrize(
    ("padding", "fields"), [("left", {"attention_bias": False}), (None, {"num_key_value_heads": 1})], ids=str
)
@pytest.mark.parametrize("design", DESIGNS)
def test_projections_are_absorbed_into_a_single_source(design, padding, fields, kind):
    model, *batch = setting(padding, **DESIGNS[design] | fields)
    # The second source has padding, if any has.
    encoder_output, mask, targets = (part[1:2] for part in batch)
    state = make_state(kind, model, encoder_output, mask)
    config = model.config
    assert (state._absorbed is None) == (config.qk_norm or config.norm_position == "both")
    expected = whole(model, encoder_output, mask, targets)
    assert_near(step_through(state, targets), expected)
    # Without absorbed projections, the output differs by rounding only.
    state = make_state(kind, model, encoder_output, mask)
    state._absorbed = None
    assert_near(step_through(state, targets), expected)


# Targets that continue one another

COPIES = 4
# The target of its source that each target continues: itself, mostly others, one for all.
MOVES = [[0, 1, 2, 3], [3, 3, 0, 1], [1, 1, 2, 3], [2, 2, 2, 2]]


def walk(setup, turns, leaving=None):
    """Extend and reorder targets at random, and compare each step with a forward pass over each target alone.

    The second source leaves after step `leaving`. Return the state, and how many tokens it kept of each source at each step.
    """
    model, encoder_output, mask = setup
    generator = torch.Generator().manual_seed(3)

    def draw(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator)

    with torch.inference_mode():
        state = make_state(BeamState, model, encoder_output, mask)
        paths, sources, kept = draw(model.config.decoder_vocab_size, 3, 2, low=3), torch.arange(3), []
        step_through(state, paths)
        state.expand_beams(COPIES)
        paths, sources = paths.repeat_interleave(COPIES, dim=0), sources.repeat_interleave(COPIES)
        for turn in range(turns):
            tokens = draw(model.config.decoder_vocab_size, len(paths), 1, low=3)
            paths = torch.cat((paths, tokens), dim=1)
            outputs = state.step(tokens[:, 0])
            kept.append(state._token_positions.shape[1])
            assert_near(outputs, whole(model, encoder_output[sources], mask[sources], paths)[:, -1])
            if turn == leaving:
                state.select_sources(torch.tensor([0, 2]))
                paths, sources = paths[sources != 1], sources[sources != 1]
            # Each source moves in its own way.
            moves = torch.tensor(MOVES)[draw(len(MOVES), len(paths) // COPIES)]
            rows = (moves + COPIES * torch.arange(len(moves))[:, None]).flatten()
            state.reorder(rows)
            paths = paths[rows]
    assert (state.copies, state.length) == (COPIES, 2 + turns)
    return state, kept


@pytest.mark.parametrize("design", DESIGNS | RECURRENT)
def test_one_step_needs_no_keys_and_values_of_the_sources(design):
    model, output, mask, targets = setting("right", **(DESIGNS | RECURRENT)[design])
    config, decoder = model.config, model.get_decoder()
    assert FirstStep.supports(decoder) != (config.qk_norm or config.attn_logit_softcapping is not None)
    for rows in (slice(0, 3), slice(1, 2)) if FirstStep.supports(decoder) else ():
        state = make_state(FirstStep, model, output[rows], mask[rows])
        expected = whole(model, output[rows], mask[rows], targets[rows, :1])
        assert_near(step_through(state, targets[rows, :1]), expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("design", CROSSED)
def test_targets_are_as_if_alone(design, groups):
    state, kept = walk(setting(**CROSSED[design], num_key_value_heads=4 // groups)[:3], turns=6, leaving=3)
    # The prompt is stored once.
    assert len(state._token_positions) == 2 and state.groups == groups and kept[0] == 2 + COPIES


@pytest.mark.parametrize("design", DESIGNS)
def test_unused_tokens_are_dropped(design):
    state, kept = walk(setting("right", **DESIGNS[design])[:3], turns=30)
    # Each step adds a token for each target. A token that few targets hold is soon held by none.
    assert max(kept) < 2 * state.length and state._target_cache.keys.shape[4] < 4 * state.length
    assert any(later < earlier for earlier, later in itertools.pairwise(kept))


def test_unwritten_entries_may_be_nan(monkeypatch):
    setup = setting(**DESIGNS["relative"])[:3]
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, torch.nan))
    state, _ = walk(setup, turns=20, leaving=9)
    assert state._target_cache.keys[..., state._token_positions.shape[1] :].isnan().any()


# Prepared weights


class Doubled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def first_step(model):
    batch = random_batch(model.config, padding=None)
    with torch.no_grad():
        encoder_output = model.get_encoder()(batch["input_ids"]).last_hidden_state
        return DecoderState(model.get_decoder(), encoder_output, None).step(batch["decoder_input_ids"][:, 0])


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**random_batch(model.config, with_labels=True)).loss.backward()
    optimizer.step()


def in_layers(change):
    return lambda model: [change(layer) for layer in model.get_decoder().layers]


def replace(module, lay_out=lambda weight: weight):
    module.weight = nn.Parameter(lay_out(2 * module.weight))


class Doubling(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "written": lambda model: [weight.mul_(2) for weight in model.parameters()],
    "written past the version": lambda model: [weight.data.mul_(2) for weight in model.parameters()],
    "silent heads": in_layers(lambda layer: layer.self_attn.o_proj.weight.data[:, 1:8].zero_()),
    "other data": lambda model: [setattr(weight, "data", weight.data * 2) for weight in model.parameters()],
    "other projections": in_layers(
        lambda layer: [
            replace(module) for module in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj)
        ]
    ),
    "training": torch.enable_grad()(train),
    "parametrization": in_layers(
        lambda layer: parametrize.register_parametrization(layer.mlp.up_proj, "weight", Doubling())
    ),
    "fewer layers": lambda model: model.get_decoder().layers.pop(-1),
    "own class": in_layers(lambda layer: setattr(layer.self_attn.v_proj, "__class__", Doubled)),
    "transposed weight": in_layers(
        lambda layer: replace(layer.mlp.up_proj, lambda weight: weight.t().contiguous().t())
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_are_seen(change, dtype):
    model = tiny_model(gated_mlp=True).to(dtype)
    before = first_step(model)
    with torch.no_grad():
        change(model)
    after = first_step(model)
    assert torch.equal(after, first_step(copy.deepcopy(model)))
    assert not torch.allclose(after, before, atol=1e-3 if dtype == torch.float32 else 0.02)


def test_copies_serve_again_as_long_as_nothing_changes():
    model = tiny_model(gated_mlp=True, num_key_value_heads=2)
    first_step(model)
    [before] = prepacked_weights._copies[model.get_decoder()].values()
    model.float().eval().requires_grad_(False)
    first_step(model)
    assert list(prepacked_weights._copies[model.get_decoder()].values()) == [before]


def test_copies_are_freed_with_training_and_with_the_model_and_not_saved():
    model = tiny_model()
    names, decoder, owners = set(model.state_dict()), model.get_decoder(), prepacked_weights._copies
    first_step(model)
    assert decoder in owners and set(model.state_dict()) == names
    assert copy.deepcopy(model).get_decoder() not in owners
    model.train()
    assert decoder not in owners
    first_step(model.eval())
    count = len(owners)
    del model, decoder
    gc.collect()
    assert len(owners) < count


def test_weights_without_versions_are_not_copied():
    """Changes of weights that were made in inference mode cannot be seen."""
    with torch.inference_mode():
        model = tiny_model()
    before = first_step(model)
    with torch.inference_mode():
        model.get_decoder().layers[0].self_attn.v_proj.weight[3, 1] += 100
    assert not torch.allclose(first_step(model), before, atol=1e-3)


def head_of(model):
    return prepared_projections(model)[0].keywords["head"]


def test_changed_head_is_copied_again():
    model, states = tiny_model(tie_word_embeddings=False), torch.randn(3, 32)
    first = head_of(model)
    assert first is not model.lm_head and head_of(model) is first and first._is_transposed
    torch.testing.assert_close(first(states), model.lm_head(states))
    for change in (
        lambda: model.lm_head.weight.data.mul_(2),
        lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight + 1)),
        lambda: setattr(model, "lm_head", nn.Linear(32, 50, bias=False)),
    ):
        before = head_of(model)
        with torch.no_grad():
            change()
        assert head_of(model) is not before
        torch.testing.assert_close(head_of(model)(states), model.lm_head(states))
    model.train()
    assert model.get_decoder() not in prepacked_weights._copies


def test_hooked_head_is_called():
    model = tiny_model()
    inputs = random_sources(model.config)
    options = {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": None}
    before = model.generate(**inputs, **options)
    bias = 1e4 * nn.functional.one_hot(torch.tensor(9), model.config.decoder_vocab_size)
    handle = model.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bias)
    assert (model.generate(**inputs, **options)[:, 1:] == 9).all()
    handle.remove()
    assert torch.equal(model.generate(**inputs, **options), before)
