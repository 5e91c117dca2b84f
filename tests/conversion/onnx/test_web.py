"""Tests of the export for browsers and Node: files, quantized graphs and refusals, with onnxruntime alone."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from subcommands import execute
from tiny_generator import SOURCES, save_generator, tiny_generator
from tiny_languages import nllb_tokenizer
from transformers import AutoTokenizer, GenerationConfig

from metaphrase.conversion.onnx.export import GRAPH_NAMES, LIBRARY_FILES, empty_cache, export_web, run_step
from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair, train_tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A generator with two tokenizers, and the folder of its export."""
    folder = tmp_path_factory.mktemp("web")
    generator = tiny_generator(joint=False, layers=1)
    source = save_generator(generator, folder / "model")
    library = folder / "node_modules"
    for name in LIBRARY_FILES:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    execute("export", [str(source), str(folder / "exported"), "--format", "web", "--library", str(library)])
    return generator, folder / "exported"


def open_graphs(folder, suffix=""):
    names = [name.replace(".onnx", f"{suffix}.onnx") for name in GRAPH_NAMES]
    return [onnxruntime.InferenceSession(str(folder / "onnx" / name)) for name in names]


def greedy(generator, folder, text, suffix=""):
    """Decode as page/metaphrase.mjs does: tokenizer, encoder, decoder with an empty cache at first."""
    encoder, decoder = open_graphs(folder, suffix)
    config = json.loads((folder / "config.json").read_text())
    settings = GenerationConfig.from_pretrained(folder)
    ids = np.array([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    mask = np.ones_like(ids)
    states = encoder.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    inputs = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    past, target = empty_cache(generator.model, 1), [config["decoder_start_token_id"]]
    while target[-1] != config["eos_token_id"] and len(target) < settings.max_length:
        outputs = run_step(decoder, inputs | past | {"input_ids": np.array([target[-1:]])})
        target.append(int(outputs["logits"][0, -1].argmax()))
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="target_tokenizer")
    return tokenizer.decode(target, skip_special_tokens=True)


def test_texts_are_those_of_torch(exported):
    generator, folder = exported
    texts = [*SOURCES, "dog", "e", "sleeps the"]
    expected = generator.generate(texts, num_beams=1)
    assert [greedy(generator, folder, text) for text in texts] == expected
    assert len({*expected}) > 2


def test_integers_compute_nearly_what_the_model_computes(exported):
    generator, folder = exported
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, generator.model.config.vocab_size, (2, 9), generator=draw).numpy()
    targets = torch.randint(4, generator.model.config.decoder_vocab_size, (2, 6), generator=draw).numpy()
    logits = []
    for suffix in ("", "_quantized"):
        encoder, decoder = open_graphs(folder, suffix)
        states = encoder.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
        inputs = {"encoder_attention_mask": np.ones_like(ids), "encoder_hidden_states": states, "input_ids": targets}
        logits.append(run_step(decoder, inputs | empty_cache(generator.model, 2))["logits"])
    difference = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    # The weights of a tiny model are large, so that all errors show.
    assert 0 < difference < 0.15


def test_folder_has_the_files_of_transformers_js(exported):
    _, folder = exported
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    graphs = {f"onnx/{name.removesuffix('.onnx')}{kind}.onnx" for name in GRAPH_NAMES for kind in ("", "_quantized")}
    page = {"index.html", "common.css", "common.js", "page.css", "page.mjs", "metaphrase.mjs", "README.md"}
    library = {f"library/{Path(name).name}" for name in LIBRARY_FILES}
    tokenizers = {
        f"{side}{name}" for side in ("", "target_tokenizer/") for name in ("tokenizer.json", "tokenizer_config.json")
    }
    assert names == graphs | page | library | tokenizers | {"config.json", "generation_config.json", "export.json"}
    provenance = json.loads((folder / "export.json").read_text())
    assert provenance["to"] == "web" and {*provenance["files"]} == names - {"export.json"}


def test_each_weight_is_stored_once(exported):
    _, folder = exported
    for path in (folder / "onnx").glob("*.onnx"):
        weights = [numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer]
        # torch's exporter copies smaller tables to transpose them.
        large = [weight for weight in weights if weight.size > 1024]
        assert large
        for index, weight in enumerate(large):
            # A transposed copy is a copy.
            copies = [
                other
                for other in large[index + 1 :]
                if any(form.shape == weight.shape and np.array_equal(form, weight) for form in (other, other.T))
            ]
            assert not copies, path.name


def with_sampling():
    generator = tiny_generator(layers=1)
    generator.model.generation_config.update(do_sample=True, top_p=0.9)
    return generator


def with_languages():
    tokenizer = nllb_tokenizer(["eng_Latn", "deu_Latn"])
    return Generator(tiny_generator(layers=1).model, TokenizerPair(tokenizer, tokenizer))


def without_ends():
    tokenizer = train_tokenizer(["a b"], kind="char", show_progress=False)
    tokenizer.backend_tokenizer.post_processor = None
    return Generator(tiny_generator(layers=1).model, TokenizerPair(tokenizer, tokenizer))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_sampling, "web cannot express the generation option `do_sample`; the generation option `top_p`"),
        (with_languages, "web cannot express the languages of a Nllb"),
        (without_ends, "whose tokenizer.json does not end a text with </s>"),
    ],
)
def test_models_that_the_page_cannot_express_are_refused(make, message, tmp_path):
    source = save_generator(make(), tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        export_web(source, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_library_without_its_files_is_refused(tmp_path):
    source = save_generator(tiny_generator(layers=1), tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="none/@huggingface/transformers"):
        export_web(source, tmp_path / "exported", library=tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name, other", [("library", "onnx"), ("quantization", "onnx"), ("quantization", "web")])
def test_options_of_other_formats_are_refused(name, other, tmp_path):
    words = ["model", str(tmp_path / "exported"), "--format", other, f"--{name}", "int8"]
    with pytest.raises(ValueError, match=f"`--{name}` must be left out with --format {other}, got 'int8'"):
        execute("export", words)
