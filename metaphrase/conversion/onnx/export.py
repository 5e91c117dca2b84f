"""Export to ONNX: two graphs checked with onnxruntime, with configuration, tokenizers and generation settings."""

import copy
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from metaphrase.conversion.checkpoints import export_folder, position_table
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SSRU, STACKS
from metaphrase.modeling.positions import has_changing_rotation
from metaphrase.tokenization import TokenizerPair

# Relative to the largest expected value.
TOLERANCE = 1e-4
# A softmax amplifies the rounding of large scores.
ATTENTION_TOLERANCE = 1e-2
# Rows, longest source, tokens of the first decoding step, later steps. None equals the traced sizes.
_SIZES = ((3, 13, 1, 5), (1, 5, 2, 3), (4, 1, 1, 2), (1, 30, 5, 2))
# These are optimum's names, which transformers.js reads.
ENCODER_NAME = "encoder_model.onnx"
DECODER_NAME = "decoder_model_merged.onnx"
GRAPH_NAMES = (ENCODER_NAME, DECODER_NAME)
# An ONNX file holds at most 2 GiB; the rest is room for the graph.
LARGEST_WEIGHTS_BYTES = 2**31 - 2**26
# The eager kernel always has a mask, and each of its operations becomes a node.
LOAD_OPTIONS = {"dtype": torch.float32, "attn_implementation": "eager"}
# All lengths differ, so that no two become one axis.
_TRACED_BATCH, _TRACED_SOURCE, _TRACED_TARGET, _TRACED_PAST_SOURCE, _TRACED_PAST_TARGET = 2, 7, 5, 4, 3
_BATCH, _SOURCE, _TARGET = "batch_size", "encoder_sequence_length", "decoder_sequence_length"


def export_onnx(source: str | os.PathLike, output: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Export a Metaphrase model to ONNX, in float32.

    Files and tensors have optimum's names: `encoder_model.onnx`, and `decoder_model_merged.onnx` for all decoding steps. The
    folder appears only when it is complete and onnxruntime computes what the model computes.

    Args:
        source: Folder or Hub id of a Metaphrase model.

    Raises:
        MetaphraseError: If ONNX cannot express the model, weights are missing, or an argument is invalid.
        RuntimeError: If onnxruntime's result differs.
    """

    def write(model: PreTrainedModel, tokenizers: TokenizerPair, folder: Path) -> None:
        write_graphs(model, folder)
        check_graphs(model, folder)
        model.config.save_pretrained(folder)

    return export_folder(source, output, overwrite, write, find_obstacles, {"to": "onnx"}, **LOAD_OPTIONS)


def check_graphs(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Compare the graphs of a folder with their model, on random ids with padding on either side."""
    paths = [os.fspath(Path(folder) / name) for name in GRAPH_NAMES]
    encoder, decoder = (onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in paths)
    config, generator = model.config, torch.Generator().manual_seed(0)
    most_source = most_target = sys.maxsize
    if config.position_embedding_type == "learned":
        most_source, most_target = (config.stack_sizes(stack).max_position_embeddings for stack in STACKS)
    for rows, source, first, steps in _SIZES:
        source, first = min(source, most_source), min(first, most_target)
        steps = min(steps, most_target - first)
        ids = torch.randint(config.vocab_size, (rows, source), generator=generator)
        targets = torch.randint(config.decoder_vocab_size, (rows, first + steps), generator=generator)
        # Each row is two tokens shorter than the row before; every other row is padded on the left.
        lengths = [max(1, source - 2 * row) for row in range(rows)]
        mask = (torch.arange(source)[None, :] < torch.tensor(lengths)[:, None]).long()
        mask[1::2] = mask[1::2].flip(-1)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": targets}
        with torch.no_grad():
            expected = model(**inputs, use_cache=False, output_attentions=not config.merged_attention)
        encoder_output = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        _compare(ENCODER_NAME, encoder_output, expected.encoder_last_hidden_state)
        inputs = {"encoder_attention_mask": mask.numpy(), "encoder_hidden_states": encoder_output}
        past = empty_cache(model, rows)
        for start, end in ((0, first), *((step, step + 1) for step in range(first, first + steps))):
            outputs = run_step(decoder, inputs | past | {"input_ids": targets[:, start:end].numpy()})
            past = {name: outputs[name.replace("past_key_values", "present", 1)] for name in past}
            _compare(DECODER_NAME, outputs["logits"], expected.logits[:, start:end])
            for layer, weights in enumerate(expected.cross_attentions or ()):
                attention = outputs[f"cross_attentions.{layer}"]
                _compare(DECODER_NAME, attention, weights[:, :, start:end], ATTENTION_TOLERANCE)


def run_step(session: onnxruntime.InferenceSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def empty_cache(model: PreTrainedModel, rows: int) -> dict[str, np.ndarray]:
    """Return the keys and values before the first decoding step: in each layer first the target's, then the source's."""
    sizes = model.config.stack_sizes("decoder")
    shape = (rows, sizes.key_value_heads, 0, sizes.head_dim)
    parts = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    names = [f"past_key_values.{layer}.{part}" for layer in range(model.config.decoder_layers) for part in parts]
    return {name: np.zeros(shape, dtype=np.float32) for name in names}


def _compare(name: str, actual: np.ndarray, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    largest = float(expected.abs().max())
    difference = float((torch.from_numpy(actual) - expected).abs().max())
    # This form also refuses NaN.
    if actual.shape != tuple(expected.shape) or not difference <= tolerance * largest:
        text = f"must compute what the model computes, within {tolerance:g} of the largest value {largest:.4g}"
        raise RuntimeError(f"{name} {text}, got a difference of {difference:.4g}.")


def find_obstacles(config: MetaphraseConfig) -> list[str]:
    """Return the options that ONNX cannot express."""
    is_recurrent = config.decoder_self_attention == SSRU
    obstacles = ["`decoder_self_attention` 'ssru', whose cache has other tensors"] if is_recurrent else []
    if has_changing_rotation(config):
        kind = config.rope_parameters["rope_type"]
        obstacles.append(f"`rope_parameters` with `rope_type` {kind!r}, whose frequencies change with the length")
    return obstacles


class EncoderGraph(nn.Module):
    """Encoder, from ids and mask (B, S) to its output (B, S, H)."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state


class DecoderGraph(nn.Module):
    """Decoding step: logits (B, T, V), then keys and values (B, heads, length, head_dim) of each layer.

    The cross-attentions (B, heads, T, S) come last. At the first step the keys and values are empty, and those of the source
    are computed from the encoder output. A later step has them, and computes those of no position. So one graph is for all
    steps, and holds each weight once.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self,
        encoder_attention_mask: torch.Tensor,
        input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        past: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        self_cache, cross_cache = DynamicCache(), DynamicCache()
        for index in range(0, len(past), 4):
            self_cache.update(past[index], past[index + 1], index // 4)
            cross_cache.update(past[index + 2], past[index + 3], index // 4)
        cache = EncoderDecoderCache(self_cache, cross_cache)
        # The layers then append the remaining positions to those in the cache.
        cache.is_updated = {}
        output = self.model.get_decoder()(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states[:, past[2].shape[2] :],
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=cache,
            output_attentions=not self.model.config.merged_attention,
            return_dict=True,
        )
        outputs = [self.model.project(output.last_hidden_state)]
        for layer, cross_layer in zip(self_cache.layers, cross_cache.layers, strict=True):
            outputs += [layer.keys, layer.values, cross_layer.keys, cross_layer.values]
        return (*outputs, *(output.cross_attentions or ()))


class _PositionTable(nn.Module):
    """Positions to add to the embeddings, as a table of fixed length."""

    def __init__(self, positions: nn.Module, config: MetaphraseConfig):
        super().__init__()
        # A slice would keep the whole table.
        self.register_buffer("table", position_table(positions, config).clone(), persistent=False)

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        return nn.functional.embedding(position_ids, self.table)


class _DistanceTable(nn.Module):
    """T5's bias by distance. Another runtime may round its logarithm differently at the edge of a bucket."""

    def __init__(self, bias: nn.Module):
        super().__init__()
        # From this distance on all tokens share a bucket; rounding may shift its edge by one.
        self.reach = bias.max_distance + 1
        distances = torch.arange(-self.reach, self.reach + 1)
        self.register_buffer("table", bias.embedding(bias.bucket(distances)).detach().clone(), persistent=False)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        rows = distance.clamp(min=-self.reach, max=self.reach) + self.reach
        # (batch, query, key, heads) -> (batch, heads, query, key)
        return nn.functional.embedding(rows, self.table).permute(0, 3, 1, 2)


def use_tables(model: PreTrainedModel) -> None:
    """Replace a model's positions by tables, so that the graph does not depend on the traced length."""
    config = model.config
    for stack in (model.get_encoder(), model.get_decoder()):
        if stack.embed_positions is not None:
            stack.embed_positions = _PositionTable(stack.embed_positions, config)
        if stack.position_bias is not None and config.position_embedding_type == "relative":
            stack.position_bias = _DistanceTable(stack.position_bias)
        for attention in (layer.self_attn for layer in stack.layers):
            if hasattr(attention, "relative_position_bias"):
                attention.relative_position_bias = _DistanceTable(attention.relative_position_bias)


def write_graphs(model: PreTrainedModel, folder: Path) -> None:
    """Write the graphs of a model in float32 and evaluation mode."""
    config, model = model.config, copy.deepcopy(model)
    use_tables(model)
    mask = torch.ones((_TRACED_BATCH, _TRACED_SOURCE), dtype=torch.long)
    ids, encoder_output = torch.zeros_like(mask), torch.zeros(_TRACED_BATCH, _TRACED_SOURCE, config.hidden_size)
    axes = {0: _BATCH, 1: _SOURCE}
    decoder_inputs = {
        "encoder_attention_mask": (mask, axes),
        "input_ids": (ids[:, :_TRACED_TARGET], {0: _BATCH, 1: _TARGET}),
        "encoder_hidden_states": (encoder_output, axes),
    }
    cache = empty_cache(model, _TRACED_BATCH)
    for name, value in cache.items():
        length, axis = (_TRACED_PAST_SOURCE, _SOURCE) if ".encoder." in name else (_TRACED_PAST_TARGET, _TARGET)
        _, heads, _, head_dim = value.shape
        decoder_inputs[name] = torch.zeros(_TRACED_BATCH, heads, length, head_dim), {0: _BATCH, 2: f"past_{axis}"}
    present = [name.replace("past_key_values", "present", 1) for name in cache]
    layers = () if config.merged_attention else range(config.decoder_layers)
    attentions = [f"cross_attentions.{layer}" for layer in layers]
    encoder_inputs = {"input_ids": (ids, axes), "attention_mask": (mask, axes)}
    with torch.no_grad():
        _write(EncoderGraph(model), encoder_inputs, ["last_hidden_state"], folder / ENCODER_NAME)
        _write(DecoderGraph(model), decoder_inputs, ["logits", *present, *attentions], folder / DECODER_NAME)


def _write(
    graph: nn.Module, inputs: dict[str, tuple[torch.Tensor, dict[int, str]]], outputs: list[str], path: Path
) -> None:
    """Trace a graph and write it. Each input has a traced value and named axes; axes of one name have one length."""
    lengths = {name: torch.export.Dim(name) for _, axes in inputs.values() for name in axes.values()}
    arguments = [value for value, _ in inputs.values()]
    shapes = [{axis: lengths[name] for axis, name in axes.items()} for _, axes in inputs.values()]
    if len(inputs) > 3:
        # All keys and values are one argument.
        arguments, shapes = [*arguments[:3], tuple(arguments[3:])], [*shapes[:3], tuple(shapes[3:])]
    # The exporter reports names that inputs share, libraries that nobody needs, and its own deprecations.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph.eval(),
            tuple(arguments),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=tuple(shapes),
            dynamo=True,
            verbose=False,
        )
    traced = program.model
    # Remove each node's place in the source code, which is longer than the graph and shows this machine's paths.
    for part in traced.graphs():
        values = [*part.inputs, *part.initializers.values(), *(value for node in part for value in node.outputs)]
        for item in (traced, part, *part, *values):
            item.metadata_props.clear()
            item.doc_string = None
    weights_bytes = sum(value.const_value.nbytes for value in traced.graph.initializers.values())
    external = f"{path.name}_data" if weights_bytes > LARGEST_WEIGHTS_BYTES else None
    onnx_ir.save(traced, path, external_data=external)
    onnx.checker.check_model(os.fspath(path))
