"""Export for browsers and Node: ONNX graphs in float32 and int8 for transformers.js, and a page that runs them."""

import collections
import contextlib
import functools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from transformers import GenerationConfig, PreTrainedModel

from metaphrase.conversion.checkpoints import export_folder
from metaphrase.conversion.onnx.export import GRAPH_NAMES, LOAD_OPTIONS, check_graphs, find_obstacles, write_graphs
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.generation_options import length_limits
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_pair import has_languages

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
        source: Folder or Hub id of a Metaphrase model.
        library: A `node_modules` that has `@huggingface/transformers`, of which the page gets a copy. None leaves the copy out.

    Raises:
        MetaphraseError: If ONNX or transformers.js cannot express the model, weights are missing, or an argument is invalid.
        RuntimeError: If onnxruntime's result differs.
    """
    library_files = [] if library is None else [Path(library) / name for name in LIBRARY_FILES]
    for path in library_files:
        if not path.is_file():
            raise MetaphraseError(
                f"`library` must be a `node_modules` with `@huggingface/transformers` 4, got {os.fspath(library)!r} without "
                f"{path.relative_to(library).as_posix()}. Run `npm install --ignore-scripts @huggingface/transformers`."
            )

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
        # Of the families that transformers.js knows, BART has our tensors and fields.
        names = ("encoder_layers", "encoder_attention_heads", "decoder_layers", "decoder_attention_heads")
        names += ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        fields = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}
        fields |= {name: getattr(config, name) for name in names}
        fields |= {"d_model": config.hidden_size, "vocab_size": config.decoder_vocab_size}
        fields |= {"max_source_tokens": config.position_limit}
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        shutil.copytree(_PAGE, folder, dirs_exist_ok=True)
        if library_files:
            (folder / LIBRARY_FOLDER).mkdir()
        for path in library_files:
            shutil.copyfile(path, folder / LIBRARY_FOLDER / path.name)

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
    steps = json.dumps(fields["pre_tokenizer"])
    fields["pre_tokenizer"] = json.loads(steps, object_hook=use_regex)
    path.write_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
