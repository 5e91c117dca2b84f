"""Sizes, texts and times of models in Node and Chromium, beside torch and CTranslate2, on one core.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/web.py runs/demo --source test.en --node_modules node_modules \\
        --random student-tiny --corpus train.en train.de --output benchmarks/results/web.json

A random model has a tokenizer with 8,000 entries, large logits, and no end of sequence, so that all targets have 20 tokens.
Contestants decode one sentence at a time, and take turns. Chromium runs on the same core.
"""

import argparse
import functools
import gzip
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import sacrebleu
import torch
import transformers
from machine import describe_machine
from selenium import webdriver

from metaphrase.conversion.onnx.export import LIBRARY_FOLDER, export_web
from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.presets import PRESETS
from metaphrase.tokenization import TokenizerPair, iterate_lines

VOCAB_SIZE, MAX_NEW_TOKENS = 8000, 20
BEAMS = (1, 4)
# A module for Node and pages. The first texts are not timed.
RUN = """
export async function run(model, texts, options) {
  for (const text of texts.slice(0, 8)) await model.translate(text, options);
  const start = performance.now(), results = [];
  for (const text of texts) results.push((await model.translate(text, options)).text);
  return { texts: results, milliseconds: (performance.now() - start) / texts.length };
}
"""
NODE = """
import fs from "node:fs";
import * as library from "@huggingface/transformers";
import { load } from "./metaphrase.mjs";
import { run } from "./run.mjs";
const { texts, options, dtype } = JSON.parse(fs.readFileSync(0));
const model = await load(library, ".", { dtype, session_options: { intraOpNumThreads: 1 } });
console.log(JSON.stringify(await run(model, texts, options)));
"""
PAGE = """
<!doctype html><meta charset="utf-8"><script type="module">
import * as library from "./library/transformers.min.js";
import { load } from "./metaphrase.mjs";
import { run } from "./run.mjs";
const at = (name) => new URL(`library/ort-wasm-simd-threaded.${name}`, document.baseURI).href;
library.env.backends.onnx.wasm.wasmPaths = { wasm: at("wasm"), mjs: at("mjs") };
Object.assign(library.env, { allowLocalModels: true, allowRemoteModels: false, useBrowserCache: false });
const model = await load(library, ".", { device: "wasm", dtype: new URLSearchParams(location.search).get("dtype") });
window.run = (texts, options) => run(model, texts, options);
</script>
"""


class QuietHandler(SimpleHTTPRequestHandler):
    """Server of files without a log."""

    def log_message(self, *arguments):
        pass


def save_random(preset: str, corpus: list[Path], folder: Path) -> Path:
    """Save a model with random weights and a tokenizer of a corpus."""
    torch.manual_seed(0)
    sides = [list(iterate_lines(path)) for path in corpus]
    tokenizers = TokenizerPair.train(sides[0], sides[-1], vocab_size=VOCAB_SIZE, show_progress=False)
    fields = PRESETS[preset] | tokenizers.config_fields() | {"logits_bias": True, "initializer_range": 0.2}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig(**fields)).eval()
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] = -1e4
    model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    model.save_pretrained(folder)
    tokenizers.save_pretrained(folder)
    return folder


def sizes(folder: Path) -> dict[str, dict[str, int]]:
    """Return the bytes that a browser downloads, plain and by gzip: the model in 8 bits with page, and the library."""
    report = {}
    for part in ("model and page", "library"):
        files = [
            path
            for path in folder.rglob("*")
            if path.is_file() and path.name not in ("export.json", "README.md", "LICENSE")
        ]
        files = [path for path in files if (LIBRARY_FOLDER in path.parts) == (part == "library")]
        files = [path for path in files if path.suffix != ".onnx" or path.stem.endswith("_quantized")]
        contents = [path.read_bytes() for path in files]
        report[part] = {
            "bytes": sum(map(len, contents)),
            "gzip": sum(len(gzip.compress(content)) for content in contents),
        }
    return report


def run_node(folder: Path, texts: list[str], dtype: str, options: dict) -> dict:
    words = {"texts": texts, "options": options, "dtype": dtype}
    done = subprocess.run(
        ["node", "node.mjs"], cwd=folder, input=json.dumps(words), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def run_chromium(url: str, texts: list[str], dtype: str, options: dict) -> dict:
    flags = webdriver.ChromeOptions()
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking"):
        flags.add_argument(f"--{flag}")
    # Without its path, selenium would look for a driver in the network.
    browser = webdriver.Chrome(options=flags, service=webdriver.ChromeService(shutil.which("chromedriver")))
    browser.set_script_timeout(600)
    try:
        browser.get(f"{url}bench.html?dtype={dtype}")
        while not browser.execute_script("return 'run' in window"):
            time.sleep(0.1)
        return browser.execute_async_script("window.run(arguments[0], arguments[1]).then(arguments[2])", texts, options)
    finally:
        browser.quit()


def run_generator(model: Path, engine: str, dtype: str, texts: list[str], options: dict) -> dict:
    generator = Generator.from_pretrained(model, engine=engine, device="cpu", dtype=dtype, batch_size=1)
    generator.generate(texts[:8], **options)
    start = time.perf_counter()
    targets = [generator.generate([text], **options)[0] for text in texts]
    return {"texts": targets, "milliseconds": 1000 * (time.perf_counter() - start) / len(texts)}


def measure(model: Path, texts: list[str], references: list[str], node_modules: Path, rounds: int) -> dict:
    """Return sizes, milliseconds for a sentence, and texts equal to those of torch in float32."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = export_web(model, Path(temporary) / "web", library=node_modules)
        report = {"sizes": sizes(folder), "sentences": len(texts), "beams": {}}
        (folder / "node_modules").symlink_to(node_modules.resolve())
        for name, content in (("run.mjs", RUN), ("node.mjs", NODE), ("bench.html", PAGE)):
            (folder / name).write_text(content.strip() + "\n", encoding="utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=os.fspath(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        contestants: dict[str, Callable[[dict], dict]] = {}
        for engine, dtype in (("torch", "float32"), ("ctranslate2", "float32"), ("ctranslate2", "int8")):
            contestants[f"{engine}, {dtype}"] = functools.partial(run_generator, model, engine, dtype, texts)
        for dtype in ("fp32", "q8"):
            contestants[f"Node, {dtype}"] = functools.partial(run_node, folder, texts, dtype)
            contestants[f"Chromium, {dtype}"] = functools.partial(run_chromium, url, texts, dtype)
        for num_beams in BEAMS:
            options = {"num_beams": num_beams, "early_stopping": num_beams > 1}
            results = {name: [] for name in contestants}
            names = list(contestants)
            for number in range(rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    results[name].append(contestants[name](options))
            targets = {name: runs[0]["texts"] for name, runs in results.items()}
            rows = report["beams"][num_beams] = {}
            for name, runs in results.items():
                rows[name] = {
                    "milliseconds_per_sentence": round(statistics.median(run["milliseconds"] for run in runs), 2),
                    "same_texts": sum(map(str.__eq__, targets[name], targets["torch, float32"])),
                }
                if references:
                    rows[name]["bleu"] = round(sacrebleu.corpus_bleu(targets[name], [references]).score, 2)
                print(model.name, num_beams, name, json.dumps(rows[name]), flush=True)
        server.shutdown()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, help="folders of trained models")
    parser.add_argument(
        "--source",
        nargs="+",
        type=Path,
        default=[],
        help="a file of pairs or sentences for each model, and for the random one",
    )
    parser.add_argument("--sentences", type=int, default=200, help="sentences of each file [%(default)s]")
    parser.add_argument("--random", choices=PRESETS, help="preset of a random model")
    parser.add_argument("--corpus", nargs="+", type=Path, help="texts for the tokenizer of the random model")
    parser.add_argument("--node_modules", type=Path, required=True, help="folder with @huggingface/transformers")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [%(default)s]")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    package = json.loads(
        (arguments.node_modules / "@huggingface/transformers/package.json").read_text(encoding="utf-8")
    )
    machine = describe_machine(1) | {"transformers.js": package["version"]}
    machine["node"] = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    report = {"machine": machine, "rounds": arguments.rounds, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        models = list(arguments.models)
        if arguments.random:
            models.append(save_random(arguments.random, arguments.corpus, Path(folder) / arguments.random))
        for model, path in zip(models, arguments.source, strict=True):
            lines = [line.split("\t") for line in list(iterate_lines(path))[: arguments.sentences]]
            references = [line[1] for line in lines if len(line) > 1]
            report["models"][model.name] = measure(
                model, [line[0] for line in lines], references, arguments.node_modules, arguments.rounds
            )
            arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
