"""Export for browsers and Node: ONNX graphs in float32 and int8 for transformers.js, and a page that runs them."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.conversion.exports import export_folder
from metaphrase.conversion.onnx.export import GRAPH_NAMES, check_graphs, find_obstacles, write_graphs
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.generation_options import length_limits
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.tokenizer_pair import has_languages

GRAPHS_FOLDER, LIBRARY_FOLDER = "onnx", "library"
# transformers.js loads this name in a browser.
QUANTIZED_SUFFIX = "_quantized"
# The library in one file, and the part of onnxruntime that runs on a CPU. The page loads these.
LIBRARY_FILES = (
    "@huggingface/transformers/dist/transformers.min.js",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
)
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
        output: The folder to write.
        library: A `node_modules` that has `@huggingface/transformers`, of which the page gets a copy. None leaves the copy out.
        overwrite: True to replace an `output` that this package wrote.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If ONNX or transformers.js cannot express the model, weights are missing, or an argument is invalid.
        OSError: If the model does not exist.
        RuntimeError: If onnxruntime's result differs.
    """
    library_files = [] if library is None else [Path(library) / name for name in LIBRARY_FILES]
    for path in library_files:
        if not path.is_file():
            raise ValueError(
                f"`library` must be a `node_modules` with {' and '.join(LIBRARY_FILES)}, got {os.fspath(library)!r} without "
                f"{path.name}. Run `npm install --ignore-scripts @huggingface/transformers`."
            )

    def find_all_obstacles(config: MetaphraseConfig) -> list[str]:
        obstacles = find_obstacles(config) + tokenizer_obstacles(TokenizerPair.from_pretrained(source))
        # Not every model has the file.
        with contextlib.suppress(OSError):
            obstacles += search_obstacles(GenerationConfig.from_pretrained(source))
        if config.decoder_start_from_labels or config.decoder_start_token_id is None:
            obstacles.append("a `decoder_start_token_id` that depends on the target language")
        return obstacles

    def write(model: PreTrainedModel, tokenizers: TokenizerPair, folder: Path) -> None:
        graphs = folder / GRAPHS_FOLDER
        graphs.mkdir()
        write_graphs(model, graphs)
        check_graphs(model, graphs)
        for name in GRAPH_NAMES:
            quantize_graph(graphs / name)
        limit_length(model)
        (folder / "config.json").write_text(json.dumps(web_config(model.config), indent=2) + "\n", encoding="utf-8")
        shutil.copytree(_PAGE, folder, dirs_exist_ok=True)
        if library_files:
            (folder / LIBRARY_FOLDER).mkdir()
        for path in library_files:
            shutil.copyfile(path, folder / LIBRARY_FOLDER / path.name)

    load_options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return export_folder(source, output, overwrite, write, find_all_obstacles, {"to": "web"}, **load_options)


def web_config(config: MetaphraseConfig) -> dict[str, object]:
    """Return the configuration that transformers.js reads.

    The library knows families by name only. BART's has the tensors of every encoder-decoder with a kv cache, and the
    names of its fields are ours.
    """
    names = ("encoder_layers", "encoder_attention_heads", "decoder_layers", "decoder_attention_heads")
    names += ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "is_encoder_decoder": True,
        **{name: getattr(config, name) for name in names},
        "d_model": config.hidden_size,
        "vocab_size": config.decoder_vocab_size,
        "max_source_tokens": config.position_limit,
    }


def limit_length(model: PreTrainedModel) -> None:
    """Set the length limit of `generate()` in the model's settings. Without a setting, the library's default is another one."""
    config, settings = model.config, model.generation_config
    _, max_length = length_limits(model, {})
    if max_length is None:
        max_length = GenerationConfig._get_default_generation_params()["max_length"] + 1
    if config.decoder_position_limit is not None:
        max_length = min(max_length, config.decoder_position_limit)
    settings.max_length, settings.max_new_tokens = max_length, None


def quantize_graph(path: Path) -> None:
    """Write a copy of a graph with weights in 8 bits beside it. Embeddings that project, too, stay one tensor."""
    quantized = path.with_stem(path.stem + QUANTIZED_SUFFIX)
    # Signed weights overflow in 16 bits on processors without VNNI.
    quantize_dynamic(path, quantized, per_channel=True, weight_type=QuantType.QUInt8)


def tokenizer_obstacles(tokenizers: TokenizerPair) -> list[str]:
    """Return properties of tokenizers that transformers.js cannot express."""
    obstacles = []
    for tokenizer in dict.fromkeys((tokenizers.source, tokenizers.target)):
        name = type(tokenizer).__name__
        if not tokenizer.is_fast:
            obstacles.append(f"a {name}, which has no tokenizer.json")
        elif has_languages(tokenizer):
            obstacles.append(f"the languages of a {name}")
        elif not ends_texts(tokenizer):
            obstacles.append(f"a {name} whose tokenizer.json does not end a text with {tokenizer.eos_token}")
    return obstacles


def ends_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer itself ends each text with the end of sequence."""
    return all(ids[-1:] == [tokenizer.eos_token_id] for ids in tokenizer(["", "a"])["input_ids"])


def search_obstacles(settings: GenerationConfig) -> list[str]:
    """Return generation settings that the page's search does not carry out."""
    changed = settings.to_diff_dict()
    return [f"the generation option `{name}`" for name in changed if name not in _SEARCH_OPTIONS]
