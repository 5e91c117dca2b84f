"""Export to ONNX: two graphs checked with onnxruntime. For browsers and Node, copies in int8 and a page that runs them."""

import collections
import contextlib
import copy
import functools
import json
import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from metaphrase.conversion.checkpoints import export_folder, position_table
from metaphrase.errors import naming_extra
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SSRU
from metaphrase.modeling.positions import has_changing_rotation
from metaphrase.storage.generation_options import length_limits
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_pair import has_languages

with naming_extra("onnx", "ONNX"):
    import onnx
    import onnx_ir
    import onnxruntime
    import onnxscript  # noqa: F401 (torch's exporter needs it)
    from onnx import helper, numpy_helper

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

LIBRARY_FOLDER = "library"
# The library in one file, and the part of onnxruntime that runs on a CPU. The page loads these.
LIBRARY_FILES = (
    "@huggingface/transformers/LICENSE",
    "@huggingface/transformers/dist/transformers.min.js",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
)
# Smaller matrices, such as position biases, stay in float32.
_SMALLEST_MATRIX = 1024
_PAGE = Path(__file__).with_name("page")
# Options that page/metaphrase.mjs carries out as transformers does, and those without effect on the text.
_SEARCH_OPTIONS = {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "early_stopping"}
_SEARCH_OPTIONS |= {"length_penalty", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"}
_SEARCH_OPTIONS |= {"begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"}
_SEARCH_OPTIONS |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version"}
_SEARCH_OPTIONS |= {"use_cache", "output_attentions", "output_hidden_states", "_from_model_config"}


def export_onnx(source: str | os.PathLike, output: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Export a Metaphrase model to ONNX, in float32.

    Files and tensors have optimum's names: `encoder_model.onnx`, and `decoder_model_merged.onnx` for all decoding steps. The
    folder appears only when it is complete and onnxruntime computes what the model computes.

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
    for rows, source, first, steps in _SIZES:
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
        _write(model.get_encoder(), encoder_inputs, ["last_hidden_state"], folder / ENCODER_NAME)
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


def export_web(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    library: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a Metaphrase model to a folder of static files that transformers.js loads, with a page.

    The graphs are those of `export_onnx`, and have copies in int8. The folder appears only when it is complete and onnxruntime
    computes what the model computes.

    Args:
        library: A `node_modules` that has `@huggingface/transformers`, of which the page gets a copy. None leaves the copy out.

    Raises:
        MetaphraseError: If ONNX or transformers.js cannot express the model, weights are missing, or an argument is invalid.
        RuntimeError: If onnxruntime's result differs.
    """
    paths = [] if library is None else [Path(library) / name for name in LIBRARY_FILES]
    # A missing file is an error before the export, which takes minutes.
    library_files = {path.name: path.read_bytes() for path in paths}

    def write(model: PreTrainedModel, tokenizers: TokenizerPair, folder: Path) -> None:
        config, settings = model.config, model.generation_config
        graphs = folder / "onnx"
        graphs.mkdir()
        write_graphs(model, graphs)
        check_graphs(model, graphs)
        for name in GRAPH_NAMES:
            quantize_graph(graphs / name)
        # Without a setting, the library's default is another one than that of `generate()`.
        _, length = length_limits(model, {})
        length = GenerationConfig._get_default_generation_params()["max_length"] + 1 if length is None else length
        limit = config.decoder_position_limit
        settings.max_length, settings.max_new_tokens = length if limit is None else min(length, limit), None
        for path in folder.rglob("tokenizer.json"):
            rewrite_tokenizer(path)
        # BART is the family of transformers.js that has our tensors and fields.
        names = ("encoder_layers", "encoder_attention_heads", "decoder_layers", "decoder_attention_heads")
        names += ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        fields = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}
        fields |= {name: getattr(config, name) for name in names}
        fields |= {"d_model": config.hidden_size, "vocab_size": config.decoder_vocab_size}
        fields |= {"max_source_tokens": config.position_limit}
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        shutil.copytree(_PAGE, folder, dirs_exist_ok=True)
        for name, content in library_files.items():
            (folder / LIBRARY_FOLDER).mkdir(exist_ok=True)
            (folder / LIBRARY_FOLDER / name).write_bytes(content)

    obstacles_of = functools.partial(_find_web_obstacles, source)
    return export_folder(source, output, overwrite, write, obstacles_of, {"to": "web"}, **LOAD_OPTIONS)


def _find_web_obstacles(source: str | os.PathLike, config: MetaphraseConfig) -> list[str]:
    """Return the options of a model and its tokenizers that ONNX or transformers.js cannot express."""
    obstacles, tokenizers = find_obstacles(config), TokenizerPair.from_pretrained(source)
    for tokenizer in dict.fromkeys((tokenizers.source, tokenizers.target)):
        name = type(tokenizer).__name__
        if not tokenizer.is_fast:
            obstacles.append(f"a {name}, which has no tokenizer.json")
        elif has_languages(tokenizer):
            obstacles.append(f"the languages of a {name}")
        elif any(ids[-1:] != [tokenizer.eos_token_id] for ids in tokenizer(["", "a"])["input_ids"]):
            obstacles.append(f"a {name} whose tokenizer.json does not end a text with {tokenizer.eos_token}")
    # Not every model has the file.
    with contextlib.suppress(OSError):
        changed = GenerationConfig.from_pretrained(source).to_diff_dict()
        obstacles += [f"the generation option `{name}`" for name in changed if name not in _SEARCH_OPTIONS]
    if config.decoder_start_from_labels or config.decoder_start_token_id is None:
        obstacles.append("a `decoder_start_token_id` that depends on the target language")
    return obstacles


def quantize_graph(path: Path) -> None:
    """Write a copy of a graph beside it, whose matrices are 8-bit integers with a scale for each output or token.

    onnxruntime computes the float32 values once, when it loads the graph. Its own `quantize_dynamic` makes integers of the
    inputs of each matrix, too: the logits then differ three times as much, at the same speed for small models.
    """
    model = onnx.load(path)
    graph, kinds = model.graph, collections.defaultdict(set)
    for node in graph.node:
        for name in node.input:
            kinds[name].add(node.op_type)
    nodes, weights, parts = [], [], {}
    for weight in graph.initializer:
        users = kinds[weight.name]
        is_matrix = weight.data_type == onnx.TensorProto.FLOAT and len(weight.dims) == 2
        if not is_matrix or math.prod(weight.dims) < _SMALLEST_MATRIX or not users <= {"MatMul", "Gather", "Transpose"}:
            weights.append(weight)
            continue
        values = numpy_helper.to_array(weight)
        # A table has a row for each token, another matrix a column for each output.
        largest = np.abs(values).max(axis=0 if users == {"MatMul"} else 1, keepdims=True)
        scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(127)
        integers = np.round(values / scale).astype(np.int8)
        parts[weight.name] = names = [f"{weight.name}_{part}" for part in ("integers", "scale")]
        weights += map(numpy_helper.from_array, (integers, scale), names)
        if users != {"Gather"}:
            nodes += _scaled(*names, weight.name)
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in parts:
            rows = [f"{node.output[0]}_{part}" for part in ("integers", "scale")]
            for name, row in zip(parts[node.input[0]], rows, strict=True):
                nodes.append(helper.make_node("Gather", [name, node.input[1]], [row]))
            nodes += _scaled(*rows, node.output[0])
        else:
            nodes.append(node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)
    onnx.save(model, path.with_stem(f"{path.stem}_quantized"))


def _scaled(integers: str, scale: str, output: str) -> list[onnx.NodeProto]:
    """Return the nodes that multiply integers by their scale."""
    value = f"{integers}_value"
    cast = helper.make_node("Cast", [integers], [value], to=onnx.TensorProto.FLOAT)
    return [cast, helper.make_node("Mul", [value, scale], [output])]


def rewrite_tokenizer(path: Path) -> None:
    """Write a file of a tokenizer such that transformers.js splits texts as Python does, without white space.

    The library keeps what a pattern of plain text should remove. A regular expression is read alike by both.
    """

    def use_regex(fields: dict[str, Any]) -> dict[str, Any]:
        return {"Regex": re.escape(fields["String"])} if fields.keys() == {"String"} else fields

    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["pre_tokenizer"] = json.loads(json.dumps(fields["pre_tokenizer"]), object_hook=use_regex)
    path.write_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
