"""Windows and merged attention: what a token sees, in padded and packed rows, with and without a cache."""

import copy

import pytest
import torch
from packed_rows import packed
from tiny_models import ALTERNATING, MERGED, WINDOWS, random_sources, tiny_model
from transformers import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metaphrase.modeling import stacks
from metaphrase.modeling.configuration_metaphrase import FULL, SLIDING
from metaphrase.modeling.layers import eager_attention_forward
from metaphrase.ops import packed_stacks

(LEFT, RIGHT), TARGETS = WINDOWS.values()
POSITIONS = ["rotary", "relative", "alibi"]


def seen_by(stack, index, embeddings, **inputs):
    """Return the positions that the output at an index depends on."""
    embeddings.requires_grad_()
    stack(inputs_embeds=embeddings, **inputs).last_hidden_state[0, index].sum().backward()
    return embeddings.grad[0].any(dim=-1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_a_token_sees_the_tokens_of_its_window(kind, kernel):
    fields = {f"{stack}_layers": 1 for stack in ("encoder", "decoder")}
    fields |= {f"{stack}_layer_types": [SLIDING] for stack in ("encoder", "decoder")}
    model = tiny_model(position_embedding_type=kind, attn_implementation=kernel, **fields, **WINDOWS)
    states = torch.randn(1, 12, 32)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, 9:] = 0
    encoder = model.get_encoder()
    assert seen_by(encoder, 5, states.clone()) == [4, 5, 6, 7, 8]
    assert seen_by(encoder, 8, states.clone(), attention_mask=mask) == [7, 8]
    assert seen_by(model.get_decoder(), 7, states.clone(), encoder_hidden_states=states) == [4, 5, 6, 7]


@torch.no_grad()
def test_a_merged_attention_is_one_softmax_over_target_and_source():
    model = tiny_model(**MERGED | {"decoder_layers": 1, "decoder_layer_types": [FULL], "decoder_window": None})
    attention, states = model.get_decoder().layers[0].self_attn, torch.randn(2, 5, 32)
    source, mask = torch.randn(2, 3, 32), torch.ones(2, 1, 5, 8).tril().bool()
    mask[..., 5:] = True
    output, _ = attention(states, encoder_hidden_states=source, attention_mask=mask)
    query, key, value = (
        projection(inputs).unflatten(-1, (4, 8)).transpose(1, 2)
        for projection, inputs in (
            (attention.q_proj, states),
            (attention.k_proj, torch.cat((states, source), dim=1)),
            (attention.v_proj, torch.cat((states, source), dim=1)),
        )
    )
    scores = attention.q_norm(query) @ attention.k_norm(key).mT * 8**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(output, attention.o_proj((weights @ value).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("fields", "obstacle"), [(ALTERNATING, "decoder_window"), (MERGED, "merged_attention")], ids=["windows", "merged"]
)
def test_caches_change_no_token(fields, obstacle, beams):
    model = tiny_model(**fields)
    inputs = random_sources(model.config, batch=3, source=9, padding="left")
    options = {"num_beams": beams, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options, use_cache=False)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.search_obstacle == obstacle
    static = model.generate(**inputs, **options, cache_implementation="static", disable_compile=True)
    assert static.tolist() == expected.tolist()
    if obstacle == "merged_attention":
        return
    # Targets that are no longer than the window do not need it.
    options["max_new_tokens"] = TARGETS - 1
    loop = GenerationMixin._sample if beams == 1 else GenerationMixin._beam_search
    expected = model.generate(**inputs, **options, custom_generate=loop)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.search_obstacle is None


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        (ALTERNATING, "flex_attention"),
        (ALTERNATING | {"encoder_window": [1, 2]}, "flash_attention_2"),
        ({"merged_attention": True}, "flex_attention"),
        ({"position_embedding_type": "relative"}, "flex_attention"),
        ({"position_embedding_type": "alibi"}, "flash_attention_2"),
        ({"attn_logit_softcapping": 2.0}, "sdpa"),
    ],
)
def test_kernels_that_a_design_cannot_use_are_refused(fields, kernel):
    model = tiny_model(**fields)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="does not support"):
        model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == before == ("eager" if kernel == "sdpa" else "sdpa")


def test_a_sliding_rotation_of_the_decoder_alone_stops_the_fast_loops():
    windows = {"decoder_layer_types": [SLIDING, FULL], "decoder_window": 32, "sliding_rope_theta": 50.0}
    model = tiny_model(**windows)
    inputs = random_sources(model.config, batch=2, source=5)
    model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert model.search_obstacle == "sliding_rope_theta"


def test_kernels_read_window_and_softcap_by_name():
    options = []

    def recorded(*arguments, softcap=None, sliding_window=None, **kwargs):
        options.append((softcap, sliding_window))
        return eager_attention_forward(*arguments, **kwargs)

    model = tiny_model(**ALTERNATING | {"attn_logit_softcapping": 2.0})
    ALL_ATTENTION_FUNCTIONS.register("recorded", recorded)
    for layer in (model.get_encoder().layers[0], model.get_decoder().layers[0]):
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config._attn_implementation = "recorded"
        layer.self_attn(torch.randn(1, 4, 32))
    assert options == [(2.0, 1 + RIGHT), (2.0, TARGETS)]


@torch.no_grad()
def test_one_block_for_all_sequences_has_a_softcap(monkeypatch):
    """Accelerators have such a block."""
    model = tiny_model(attn_logit_softcapping=2.0)
    expected = model(**packed(model.config)).logits
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(model(**packed(model.config)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["left", "right", "hole", None])
@pytest.mark.parametrize("kind", POSITIONS)
def test_padded_batches_compute_windows_in_blocks(kind, padding, monkeypatch):
    windows = {"encoder_layer_types": [SLIDING] * 2, "encoder_window": [LEFT, RIGHT]}
    encoder = tiny_model(position_embedding_type=kind, attn_implementation="eager", **windows).get_encoder()
    # More than a block for all rows.
    states, mask = torch.randn(3, 50, 32), torch.ones(3, 50, dtype=torch.long)
    hidden = {"left": slice(0, 20), "right": slice(30, 50), "hole": slice(20, 30), None: slice(0, 0)}
    mask[1, hidden[padding]] = 0
    expected = encoder(inputs_embeds=states, attention_mask=mask, output_hidden_states=True).hidden_states
    encoder.set_attn_implementation("sdpa")
    for module in (stacks, packed_stacks):
        # A mask of all queries and keys grows with the square of the length.
        monkeypatch.setattr(module, "create_bidirectional_mask", None)
    handle = encoder.layers[0].register_forward_hook(lambda *_: None)
    # The first call leaves the hooks of transformers behind.
    for options in ({"output_hidden_states": True}, {}):
        output = encoder(inputs_embeds=states, attention_mask=None if padding is None else mask, **options)
        torch.testing.assert_close(output.last_hidden_state[mask == 1], expected[-1][mask == 1], rtol=1e-4, atol=1e-4)
        for actual, layer in zip(output.hidden_states or (), expected, strict=False):
            torch.testing.assert_close(actual[mask == 1], layer[mask == 1], rtol=1e-4, atol=1e-4)
    handle.remove()
    output.last_hidden_state.sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_padding_that_sees_no_token_stays_finite(kernel):
    model = tiny_model(attn_implementation=kernel, **ALTERNATING)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :8] = 0
    ids = torch.randint(3, 30, (2, 12))
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask).logits
    assert logits.isfinite().all()
