"""The graphs of an ONNX export: encoder and decoder with plain tensors going in and out, traced and written to files."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from metaphrase.modeling import MetaphraseConfig

try:
    import onnx
    import onnx_ir
    import onnxscript  # noqa: F401 (torch's exporter needs it)
except ImportError as error:
    raise ImportError("ONNX is not installed: pip install metaphrase[onnx]") from error

# Names as optimum's exports have them.
ENCODER_NAME = "encoder_model.onnx"
DECODER_NAME = "decoder_model.onnx"
DECODER_WITH_PAST_NAME = "decoder_with_past_model.onnx"
EXTERNAL_SUFFIX = "_data"
# A file of ONNX ends at 2 GiB, the graph and its weights together: some room is left for the graph.
LARGEST_WEIGHTS_BYTES = 2**31 - 2**26
# Sinusoids have no end, but a table has. A longer text is an error there, and never a wrong result.
SINUSOIDAL_POSITIONS = 4096

# Their frequencies change with the length of the text, by a rule that remembers the texts before.
_CHANGING_ROTATIONS = ("dynamic", "longrope")
_TRACED_BATCH, _TRACED_SOURCE, _TRACED_TARGET = 2, 7, 3


def obstacles(config: MetaphraseConfig) -> list[str]:
    """What of a configuration cannot be exported: for each option its name, its value and the reason."""
    found = []
    if config.position_embedding_type == "rotary":
        kind = config.rope_parameters.get("rope_type", "default")
        if kind in _CHANGING_ROTATIONS:
            found.append(f"`rope_parameters` with `rope_type` {kind!r}, whose frequencies change with the length")
    return found


def past_names(layers: int) -> list[str]:
    """Names of keys and values that go in, layer by layer: those of the tokens so far, then those of the source."""
    parts = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    return [f"past_key_values.{layer}.{part}" for layer in range(layers) for part in parts]


def present_names(layers: int, with_past: bool) -> list[str]:
    """Names of keys and values that come out. Those of the source do so at the first step alone: they do not change."""
    names = [name.replace("past_key_values", "present", 1) for name in past_names(layers)]
    return [name for name in names if not with_past or ".decoder." in name]


class EncoderGraph(nn.Module):
    """(batch, source) ids and mask -> (batch, source, hidden)"""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state


class DecoderGraph(nn.Module):
    """The first step of a decoder, with its output projection."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, encoder_attention_mask: torch.Tensor, input_ids: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits `(batch, target, vocab)`, then as `present_names` says `(batch, key_value_heads, length, head_dim)` each."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return self._decode(input_ids, encoder_hidden_states, encoder_attention_mask, cache, with_source=True)

    def _decode(
        self,
        input_ids: torch.Tensor,
        memory: torch.Tensor,
        memory_mask: torch.Tensor,
        cache: EncoderDecoderCache,
        with_source: bool,
    ) -> tuple[torch.Tensor, ...]:
        output = self.model.get_decoder()(
            input_ids=input_ids,
            encoder_hidden_states=memory,
            encoder_attention_mask=memory_mask,
            past_key_values=cache,
            return_dict=True,
        )
        outputs = [self.model.project(output.last_hidden_state)]
        for tokens, source in zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True):
            outputs += [tokens.keys, tokens.values]
            if with_source:
                outputs += [source.keys, source.values]
        return tuple(outputs)


class DecoderWithPastGraph(DecoderGraph):
    """A later step of a decoder: one more token of each row."""

    def forward(
        self, encoder_attention_mask: torch.Tensor, input_ids: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """As at the first step, but for keys and values of the source, which are those of `past` (see `past_names`)."""
        tokens, source = DynamicCache(), DynamicCache()
        for index in range(0, len(past), 4):
            tokens.update(past[index], past[index + 1], index // 4)
            source.update(past[index + 2], past[index + 3], index // 4)
        cache = EncoderDecoderCache(tokens, source)
        # All that is asked of the memory, once the cache has its keys and values, is how long it is.
        memory = past[0].new_zeros((*encoder_attention_mask.shape, 1))
        return self._decode(input_ids, memory, encoder_attention_mask, cache, with_source=False)


class _PositionTable(nn.Module):
    """Positions that are added to the embeddings, as a table of fixed length."""

    def __init__(self, positions: nn.Module, config: MetaphraseConfig):
        super().__init__()
        if config.position_embedding_type == "learned":
            table = positions.weight.detach()
        else:
            length = max(config.max_position_embeddings, SINUSOIDAL_POSITIONS)
            table = positions.make_table(length + positions.offset)
        # A copy: what is left of a slice must not hold the whole.
        self.register_buffer("table", table[positions.offset :].clone(), persistent=False)

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        return nn.functional.embedding(position_ids, self.table)


class _DistanceTable(nn.Module):
    """T5's bias by distance, without the logarithm, whose last place would decide otherwise elsewhere at a bucket's edge."""

    def __init__(self, bias: nn.Module):
        super().__init__()
        # From the largest distance on all share a bucket; by rounding, from one token later.
        self.reach = bias.max_distance + 1
        distances = torch.arange(-self.reach, self.reach + 1)
        self.register_buffer("table", bias.embedding(bias.bucket(distances)).detach().clone(), persistent=False)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        places = distance.clamp(min=-self.reach, max=self.reach) + self.reach
        # (batch, query, key, heads) -> (batch, heads, query, key)
        return nn.functional.embedding(places, self.table).permute(0, 3, 1, 2)


@contextlib.contextmanager
def with_tables(model: PreTrainedModel) -> Iterator[None]:
    """Lets a model look its positions up in tables, so that nothing it computes depends on how long the traced texts were."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def replace(owner: nn.Module, name: str, table: nn.Module) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, table.eval())

    try:
        for stack in (model.get_encoder(), model.get_decoder()):
            if stack.embed_positions is not None:
                replace(stack, "embed_positions", _PositionTable(stack.embed_positions, model.config))
            if model.config.position_embedding_type == "relative":
                owners = [(stack, "position_bias")]
                if not model.config.relative_attention_shared:
                    owners = [(layer.self_attn, "relative_position_bias") for layer in stack.layers]
                for owner, name in owners:
                    replace(owner, name, _DistanceTable(getattr(owner, name)))
        yield
    finally:
        for owner, name, module in replaced:
            setattr(owner, name, module)


class _Traced(NamedTuple):
    """What a graph is traced with. Axes are dynamic by their names; the same name is the same length."""

    graph: nn.Module
    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    outputs: list[str]


def write_graphs(model: PreTrainedModel, folder: Path) -> None:
    """Writes the three graphs of a model, in float32 and evaluation mode, into a folder.

    Raises:
        ValueError: If the model cannot be exported; all options in the way are named.
    """
    if found := obstacles(model.config):
        raise ValueError(f"ONNX cannot express {'; '.join(found)}.")
    with with_tables(model), torch.no_grad():
        for name, make in (
            (ENCODER_NAME, _trace_encoder),
            (DECODER_NAME, _trace_decoder),
            (DECODER_WITH_PAST_NAME, _trace_decoder_with_past),
        ):
            _write(make(model), folder / name)


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _trace_encoder(model: PreTrainedModel) -> _Traced:
    axes = {0: "batch_size", 1: "encoder_sequence_length"}
    ids = _ids(_TRACED_BATCH, _TRACED_SOURCE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return _Traced(EncoderGraph(model), inputs, dict.fromkeys(inputs, axes), ["last_hidden_state"])


def _trace_decoder(model: PreTrainedModel) -> _Traced:
    source = {0: "batch_size", 1: "encoder_sequence_length"}
    inputs = {
        "encoder_attention_mask": torch.ones_like(_ids(_TRACED_BATCH, _TRACED_SOURCE)),
        "input_ids": _ids(_TRACED_BATCH, _TRACED_TARGET),
        "encoder_hidden_states": torch.zeros(_TRACED_BATCH, _TRACED_SOURCE, model.config.hidden_size),
    }
    axes = dict.fromkeys(inputs, source) | {"input_ids": {0: "batch_size", 1: "decoder_sequence_length"}}
    outputs = ["logits", *present_names(model.config.decoder_layers, with_past=False)]
    return _Traced(DecoderGraph(model), inputs, axes, outputs)


def _trace_decoder_with_past(model: PreTrainedModel) -> _Traced:
    config = model.config
    inputs = {
        "encoder_attention_mask": torch.ones_like(_ids(_TRACED_BATCH, _TRACED_SOURCE)),
        "input_ids": _ids(_TRACED_BATCH, 1),
    }
    axes = {"encoder_attention_mask": {0: "batch_size", 1: "encoder_sequence_length"}, "input_ids": {0: "batch_size"}}
    heads = config.num_key_value_heads or config.decoder_attention_heads
    head_dim = config.get_head_dim(config.decoder_attention_heads)
    for name in past_names(config.decoder_layers):
        is_source = ".encoder." in name
        length = _TRACED_SOURCE if is_source else _TRACED_TARGET
        inputs[name] = torch.zeros(_TRACED_BATCH, heads, length, head_dim)
        axis = "encoder_sequence_length" if is_source else "past_decoder_sequence_length"
        axes[name] = {0: "batch_size", 2: axis}
    outputs = ["logits", *present_names(config.decoder_layers, with_past=True)]
    return _Traced(DecoderWithPastGraph(model), inputs, axes, outputs)


def _write(traced: _Traced, path: Path) -> None:
    lengths = {name: torch.export.Dim(name) for axes in traced.axes.values() for name in axes.values()}
    shapes = {name: {axis: lengths[length] for axis, length in axes.items()} for name, axes in traced.axes.items()}
    arguments, shapes = list(traced.inputs.values()), list(shapes.values())
    if isinstance(traced.graph, DecoderWithPastGraph):
        arguments, shapes = [*arguments[:2], tuple(arguments[2:])], [*shapes[:2], tuple(shapes[2:])]
    with _quiet():
        program = torch.onnx.export(
            traced.graph.eval(),
            tuple(arguments),
            input_names=list(traced.inputs),
            output_names=traced.outputs,
            dynamic_shapes=tuple(shapes),
            dynamo=True,
            verbose=False,
        )
    written = program.model
    _forget_origin(written)
    weights_bytes = sum(value.const_value.nbytes for value in written.graph.initializers.values())
    is_large = weights_bytes > LARGEST_WEIGHTS_BYTES
    onnx_ir.save(written, path, external_data=path.name + EXTERNAL_SUFFIX if is_large else None)
    onnx.checker.check_model(os.fspath(path))


def _forget_origin(model: "onnx_ir.Model") -> None:
    """Takes away where in the code each node was traced: it is longer than the graph, and full of this machine's paths."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()


_LEVELS = {
    "torch.onnx._internal.exporter._registration": logging.ERROR,
    "onnxscript": logging.WARNING,
    "onnx_ir": logging.WARNING,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter has to say of libraries that are not there, of axes of one length, and of each node."""
    logs = {logging.getLogger(name): level for name, level in _LEVELS.items()}
    before = {log: log.level for log in logs}
    for log, level in logs.items():
        log.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="# The axis name: .* will not be used")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
            yield
    finally:
        for log, level in before.items():
            log.setLevel(level)
