"""Flex attention over packed rows: the blocks, the gradients, and how often it is compiled.

torch has no backward pass of flex attention on a CPU; compiled down to torch's own operators, it does have what a GPU is given.
"""

import sys

import pytest
import torch
from packed_rows import TARGETS, assert_close, gradients, packed
from tiny_models import DESIGNS, random_batch, tiny_model
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as flex_integration

from metaphrase.modeling.packing import Packing, Segments
from metaphrase.ops import flex_attention as packed_flex
from metaphrase.ops.flex_attention import make_flex_mask, packed_flex_attention

HEADS, HEAD_DIM = 2, 16


@pytest.fixture
def trainable_flex(monkeypatch):
    """Flex attention with gradients, compiled as for a GPU but for the last step."""
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *_: None)
    monkeypatch.setattr(packed_flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex_integration, "WrappedFlexAttention", lambda training: lambda: compiled)
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *_, _compile, **rest: create_block_mask(*_, **rest))
    counters.clear()
    yield
    torch.compiler.reset()


def segments(*lengths):
    return Segments(torch.tensor(lengths), sum(lengths))


def packing(kind, sources, targets):
    source, target = segments(*sources), segments(*targets)
    queries, keys = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}[kind]
    return Packing(queries, keys, is_causal=kind == "decoder", kernel="flex")


ROWS = [
    ((5, 1, 19, 8), (3, 7, 2, 18)),
    ((128, 256, 1), (1, 128, 300)),
    ((500,), (129,)),
    ((60,) * 9, (64,) * 9),
    ((127, 1, 130, 126, 700), (3, 250, 131, 1, 2)),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_blocks_are_those_that_torch_finds_by_looking_at_each_pair(kind, rows):
    packed_rows = packing(kind, *rows)
    actual = make_flex_mask(packed_rows, None, None)["block_mask"]
    seen = packed_rows.is_seen()[0, 0]
    expected = create_block_mask(
        lambda batch, head, query, key: seen[query, key], None, None, *seen.shape, device="cpu"
    )
    assert actual.shape == expected.shape
    assert actual.BLOCK_SIZE == expected.BLOCK_SIZE
    names = [("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")]
    names += [("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")]
    for count, indices in names:
        counts = getattr(expected, count)
        assert getattr(actual, count).equal(counts), count
        assert getattr(actual, indices).dtype == torch.int32
        for number in range(counts.shape[-1]):
            found, wanted = (
                getattr(blocks, indices)[0, 0, number, : counts[0, 0, number]] for blocks in (actual, expected)
            )
            assert found.equal(wanted), (indices, number)


@pytest.mark.parametrize(
    "design",
    ["relative", "alibi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("relative_per_layer", "rotary"))],
)
def test_gradients_are_those_of_eager_attention(design, trainable_flex):
    model = tiny_model(attn_implementation="eager", **DESIGNS[design] | {"initializer_range": 0.2})
    expected, expected_gradients = gradients(model, packed(model.config))
    model.set_attn_implementation("flex_attention")
    output, actual_gradients = gradients(model, packed(model.config))
    assert output.logits.shape[1] == sum(TARGETS)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert_close(actual_gradients, expected_gradients)


def test_gradients_of_a_bias_are_those_of_eager_attention_in_padded_rows(trainable_flex):
    model = tiny_model(attn_implementation="eager", **DESIGNS["relative"] | {"initializer_range": 0.2})
    inputs = random_batch(model.config, padding=None, with_labels=True)
    expected, expected_gradients = gradients(model, inputs)
    model.set_attn_implementation("flex_attention")
    output, actual_gradients = gradients(model, inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert_close(actual_gradients, expected_gradients)


class TableBias(torch.nn.Module):
    """A learned number for each head and distance."""

    def __init__(self, longest):
        super().__init__()
        self.longest = longest
        self.table = torch.nn.Parameter(torch.randn(2 * longest + 1, HEADS))

    def forward(self, query_positions, key_positions):
        distances = key_positions[:, None, :] - query_positions[:, :, None]
        return self.table[distances + self.longest].permute(0, 3, 1, 2)


def attend(packed_rows, bias, states):
    """The plain way."""
    scores = states[0] @ states[1].transpose(2, 3) * 0.3
    if bias is not None:
        scores = scores + bias(packed_rows.queries.positions, packed_rows.keys.positions)
    weights = scores.masked_fill(~packed_rows.is_seen(), -torch.inf).softmax(dim=-1)
    return (weights @ states[2]).transpose(1, 2)


@pytest.mark.slow
def test_rows_of_all_lengths_share_few_kernels(trainable_flex):
    """Each is right, forward and backward, and after the first rows nothing is compiled any more."""
    generator = torch.Generator().manual_seed(1)
    bias = TableBias(300)
    graphs = []  # after each batch
    for _ in range(6):
        rows = torch.randint(60, 300, (2, int(torch.randint(3, 7, (), generator=generator))), generator=generator)
        for kind in ("encoder", "decoder", "cross"):
            packed_rows = packing(kind, *rows.tolist())
            sizes = packed_rows.queries.num_tokens, packed_rows.keys.num_tokens, packed_rows.keys.num_tokens
            states = [torch.randn(1, HEADS, size, HEAD_DIM, generator=generator, requires_grad=True) for size in sizes]
            learned = None if kind == "cross" else bias
            parameters = states if learned is None else [*states, learned.table]
            mask = make_flex_mask(packed_rows, learned, None)
            actual = packed_flex_attention(*states, mask, packed_rows, 0.3)
            expected = attend(packed_rows, learned, states)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            actual, expected = (torch.autograd.grad(output.square().sum(), parameters) for output in (actual, expected))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                packed_flex_attention(*states, mask, packed_rows, 0.3)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[2] == graphs[-1], graphs
