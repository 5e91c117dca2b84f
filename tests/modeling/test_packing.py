"""Packed rows: all pairs in one row give what they give padded, in a batch, or alone."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from packed_rows import TARGETS, assert_close, gradients, packed, ragged_pairs
from tiny_models import ALTERNATING, DESIGNS, MERGED, POSITIONS, RECURRENT, tiny_model

from metaphrase.modeling import IGNORED_LABEL
from metaphrase.ops import grid_attention, packed_rows, packed_stacks
from metaphrase.ops import linear_and_dropout as fused_linear
from metaphrase.ops.packed_rows import PackedSequences, Packing, packed_mask
from metaphrase.ops.packed_stacks import choose_kernel


def padded(config):
    sources, targets = ragged_pairs(config)
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(sources, batch_first=True, padding_value=config.pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in sources], batch_first=True),
        "labels": pad(targets, batch_first=True, padding_value=IGNORED_LABEL),
    }


ALL_DESIGNS = DESIGNS | RECURRENT | {"merged": MERGED}
ALL_DESIGNS |= {f"windows_{kind}": ALTERNATING | POSITIONS[kind] for kind in ("rotary", "relative", "alibi")}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("design", ALL_DESIGNS)
def test_packed_rows_have_the_loss_the_logits_and_the_gradients_of_padded_ones(design, kernel):
    # Larger weights make gradients so steep that the order of additions alone moves them by more than the tolerance.
    model = tiny_model(attn_implementation="eager", **ALL_DESIGNS[design] | {"initializer_range": 0.2})
    expected, expected_gradients = gradients(model, padded(model.config))
    if design != "soft_caps":
        model.set_attn_implementation(kernel)
    output, actual_gradients = gradients(model, packed(model.config))
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    rows = [expected.logits[row, :length] for row, length in enumerate(TARGETS)]
    torch.testing.assert_close(output.logits[0], torch.cat(rows), rtol=1e-4, atol=1e-4)
    assert_close(actual_gradients, expected_gradients)


def attend_by_offsets(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale=None):
    """Compute flash attention by offsets, of `(tokens, heads, head_dim)`, as documented."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    outputs = []
    for number in range(len(cu_seq_q) - 1):
        query_rows, key_rows = (slice(*offsets[number : number + 2].tolist()) for offsets in (cu_seq_q, cu_seq_k))
        states = (rows.transpose(0, 1) for rows in (query[query_rows], key[key_rows], value[key_rows]))
        output = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=is_causal, scale=scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def varlen_attn_of_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size in [(-1, -1), (-1, 0)]
    return attend_by_offsets(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale)


def varlen_attn_of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return attend_by_offsets(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)


@pytest.mark.parametrize("varlen_attn", [varlen_attn_of_2_13, varlen_attn_of_2_10])
@pytest.mark.parametrize("design", ["sinusoidal", "rotary"])
def test_attention_by_offsets_is_told_what_the_rows_are(design, varlen_attn, monkeypatch):
    # torch has no such kernel for a CPU: a plain one takes its place.
    calls = []

    def count(*args, **kwargs):
        calls.append(kwargs)
        return varlen_attn(*args, **kwargs)

    count.__signature__ = inspect.signature(varlen_attn)
    monkeypatch.setattr(packed_rows, "varlen_attn", count)
    packed_rows.varlen_causal.cache_clear()
    fields = DESIGNS[design] | {"initializer_range": 0.2, "attention_scale": 0.3}
    model = tiny_model(attn_implementation="eager", **fields)
    expected, expected_gradients = gradients(model, packed(model.config))
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(packed_stacks, "choose_kernel", lambda *_, **__: "varlen")
    output, actual_gradients = gradients(model, packed(model.config))
    assert len(calls) == model.config.encoder_layers + 2 * model.config.decoder_layers
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert_close(actual_gradients, expected_gradients)


def test_gpu_has_a_kernel_that_it_can_run(monkeypatch):
    def choose(kernel="sdpa", head_dim=64, capability=(8, 0), dtype=torch.bfloat16, is_plain=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        config = SimpleNamespace(_attn_implementation=kernel, attn_logit_softcapping=None)
        stack = SimpleNamespace(config=config, sizes=SimpleNamespace(head_dim=head_dim), training=False)
        states = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
        return choose_kernel(stack, states, is_plain)

    assert choose() == choose(dtype=torch.float16, head_dim=256) == choose("flash_attention_2") == "varlen"
    obstacles = [{"capability": (7, 5)}, {"dtype": torch.float32}, {"is_plain": False}]
    for obstacle in (*obstacles, {"head_dim": 36}, {"head_dim": 264}):
        assert choose(**obstacle) == "grid", obstacle
    assert choose("eager") == "reference"
    with pytest.raises(ValueError, match="`attn_implementation`"):
        choose("sharp")


@pytest.mark.parametrize("kept_bytes", [0, 2**25])
@pytest.mark.parametrize("block", [1, 24 * 24 * 8])
@pytest.mark.parametrize("design", ["relative_per_layer", "alibi"])
def test_blocks_of_the_grid_and_what_they_keep_change_nothing(design, block, kept_bytes, monkeypatch):
    model = tiny_model(**DESIGNS[design] | {"initializer_range": 0.2})
    expected, expected_gradients = gradients(model, packed(model.config))
    monkeypatch.setattr(grid_attention, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(grid_attention, "MAX_KEPT_BYTES", kept_bytes)
    output, actual_gradients = gradients(model, packed(model.config))
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert_close(actual_gradients, expected_gradients)


@pytest.fixture
def filled_memory():
    """New memory holds what is not a number, rather than what happened to be there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_new_memory_holds_changes_nothing(dropout, is_autocast, filled_memory, monkeypatch):
    model = tiny_model(initializer_range=0.2, position_embedding_type="sinusoidal", attention_dropout=dropout).train()
    monkeypatch.setattr(fused_linear, "_LEAST_SIZE", 0)
    assert torch.empty(3).isnan().all()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            results.append(gradients(model, packed(model.config)))
        torch.use_deterministic_algorithms(False)
    (actual, actual_gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=0)
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-5, atol=1e-6)


LENGTHS = (24, 23, 16, 15, 9, 1)  # one cell of a row is empty, none is, or most are


def attend_in_grid(states, queries, keys, is_causal):
    """Return the output of the grid, and of torch's attention to each sequence alone in float64."""
    packing = Packing(queries, keys, is_causal, "grid")
    mask = packed_mask(packing, None, states[0])
    actual = grid_attention.grid_attention(states, mask, packing, 0.6, 0.0)
    sizes = [side.lengths.tolist() for side in (queries, keys, keys)]
    parts = zip(*(side.double().split(size, dim=2) for side, size in zip(states, sizes, strict=True)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    return actual, torch.cat([attend(*part, is_causal=is_causal, scale=0.6) for part in parts], dim=2).transpose(1, 2)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_sequence_attends_as_if_it_were_alone(is_causal, is_compiled, monkeypatch):
    monkeypatch.setattr(grid_attention, "BLOCK_ENTRIES", 2 * 2 * 24 * 24)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiled)
    keys = PackedSequences(torch.tensor(LENGTHS), sum(LENGTHS))
    queries = keys if is_causal else PackedSequences(torch.tensor(LENGTHS[::-1]), sum(LENGTHS))
    states = [torch.randn(1, 2, sum(LENGTHS), 4, requires_grad=True) for _ in range(3)]
    actual, expected = attend_in_grid(states, queries, keys, is_causal)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(actual)
    results = [torch.autograd.grad((output * weight).sum(), states) for output in (actual, expected)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offset", [500.0, -500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_may_be_of_any_size(dtype, offset, is_causal):
    """Exponentials of the scores themselves would be infinite, or zero in all of a row."""
    segments = PackedSequences(torch.tensor(LENGTHS), sum(LENGTHS))
    query, key, value = torch.randn(3, 1, 2, sum(LENGTHS), 4)
    # All scores of a row differ by as much, which changes no weight.
    query[..., 0], key[..., 0] = 1, offset
    # A score of 300 in bfloat16 is one of 298, 300, 302: of its weights it is known that they add up to 1.
    value = value if dtype == torch.float32 else torch.ones_like(value)
    states = [side.to(dtype).requires_grad_() for side in (query, key, value)]
    actual, expected = attend_in_grid(states, segments, segments, is_causal)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-2)
    gradients = torch.autograd.grad(actual.float().square().sum(), states)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kept_bytes", [0, 2**25])
def test_dropped_weights_are_the_same_forward_and_backward(kept_bytes, monkeypatch):
    """The gradient of a loss under a fixed mask of dropout agrees with its finite differences."""
    monkeypatch.setattr(grid_attention, "MAX_KEPT_BYTES", kept_bytes)
    model = tiny_model(position_embedding_type="relative", attention_dropout=0.4, initializer_range=0.2).train()
    inputs = packed(model.config)

    def loss():
        torch.manual_seed(3)
        return model(**inputs).loss

    for name in ("encoder.layers.0.self_attn.v_proj", "decoder.layers.1.cross_attn.k_proj"):
        weight = model.model.get_submodule(name).weight
        direction = torch.randn_like(weight)
        model.zero_grad()
        loss().backward()
        slope = (weight.grad * direction).sum().item()
        with torch.no_grad():
            weight += 1e-2 * direction
            above = loss().item()
            weight -= 2e-2 * direction
            below = loss().item()
            weight += 1e-2 * direction
        assert (above - below) / 2e-2 == pytest.approx(slope, rel=0.05, abs=2e-4), name


@pytest.mark.parametrize("kept_bytes", [0, 2**25])
@pytest.mark.parametrize("longest", [20, 40])
def test_bfloat16_stays_close_in_narrow_and_in_wide_grids(longest, kept_bytes, monkeypatch):
    monkeypatch.setattr(grid_attention, "MAX_KEPT_BYTES", kept_bytes)
    model = tiny_model(position_embedding_type="relative", initializer_range=0.2)
    lengths = torch.tensor([longest, 3, longest // 2])
    ids, labels = torch.randint(3, 37, (2, 1, int(lengths.sum())), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": labels, "source_lengths": lengths, "target_lengths": lengths}
    expected, expected_gradients = gradients(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output, actual = gradients(model, inputs)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    for name, gradient in expected_gradients.items():
        assert (actual[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-3, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_lengths": torch.tensor([5, 1, 19])}, "add up to the 33 tokens"),
        ({"source_lengths": torch.tensor([5, 1, 19, 8, 0])}, "at least 1"),
        ({"target_lengths": torch.tensor([3, 27])}, "got 4 sources and 2 targets"),
        ({"target_lengths": None}, "`target_lengths` must be given"),
        ({"attention_mask": torch.ones(1, 33)}, "`attention_mask`"),
        ({"input_ids": torch.ones(2, 33, dtype=torch.long)}, "got 2 rows"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change, message):
    model = tiny_model()
    inputs = packed(model.config) | {"longest_target": None} | change
    with pytest.raises(ValueError, match=message):
        model(**inputs)
