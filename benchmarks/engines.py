"""Times the engines of a generator in turns: torch, CTranslate2, `auto`, which chooses one of the two, and transformers.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/engines.py --output benchmarks/results/engines_zen4.json

A model is a preset with random weights, or the folder of a trained model. Random models get large logits, since flat ones are
slower to search, and no end of sequence, so that all targets have the same length,
`--max_new_tokens`. Each engine makes the same batches of
similar length. Contestants take turns, and each round starts with another one, so that other load on the machine affects
all of them. The time is processor time of one thread. transformers runs a random model as its own Marian class, in float32.
The report also says how many calls torch makes in a step of ours, and which part of their time is matrix products.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
import transformers
from lengths import MIXES
from machine import describe_machine
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from metaphrase.conversion import convert
from metaphrase.conversion.ctranslate2 import find_obstacles
from metaphrase.inference import ENGINES, Generator
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.presets import PRESETS
from metaphrase.tokenization import TokenizerPair, iterate_lines

BEAMS, BATCHES, DTYPES = (1, 4), (1, 32), ("float32", "int8")
# Sentences of a batch of 1 take long.
SENTENCES = {1: 16, 32: 96}
PEER = "transformers"
# Matrix products of torch.
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "mkl::_mkl_linear", "mkldnn::_linear_pointwise")


def save_random(config: MetaphraseConfig, folder: Path) -> Path:
    """Save a model with random weights and a tokenizer of numbered words. With a bias of the logits, it writes no end."""
    torch.manual_seed(0)
    model = MetaphraseForConditionalGeneration(config).eval()
    if config.logits_bias:
        with torch.no_grad():
            model.lm_head.bias[config.eos_token_id] = -1e4
    model.save_pretrained(folder)
    special = {"bos": config.bos_token_id, "eos": config.eos_token_id, "pad": config.pad_token_id}
    names = {index: f"<{name}>" for name, index in special.items() if index is not None}
    words = {names.get(index, f"w{index}"): index for index in range(config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w9"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", config.eos_token_id)]
    )
    tokens = {f"{name}_token": f"<{name}>" for name, index in special.items() if index is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w9", **tokens)
    TokenizerPair(tokenizer, tokenizer).save_pretrained(folder)
    return folder


def random_texts(count: int, vocab_size: int) -> list[str]:
    """Return texts of numbered words in the lengths of Multi30k."""
    lengths = MIXES["multi30k"].draw(count, seed=0)[:, 0].tolist()
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randint(10, vocab_size, (length - 1,), generator=generator).tolist() for length in lengths)
    return [" ".join(f"w{index}" for index in draw) for draw in draws]


def measure(
    generators: dict[str, Generator],
    texts: list[str],
    num_beams: int,
    batch_size: int,
    rounds: int,
    max_new_tokens: int,
) -> dict[str, dict]:
    """Return the report of one setting."""
    options = {"num_beams": num_beams, "do_sample": False, "early_stopping": num_beams > 1}
    options["max_new_tokens"] = max_new_tokens
    names, outputs = list(generators), {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for generator in generators.values():
        # Weights are prepacked after some calls, and `auto` decodes the first sentences by torch.
        for size in (32, batch_size):
            generator.batch_size = size
            generator.generate(texts, **options | {"max_new_tokens": 4})
    chosen = texts[: SENTENCES[batch_size]]
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            outputs[name] = generators[name].generate(chosen, **options)
            seconds[name].append(time.process_time() - start)
    report = {}

    def speed(name: str, other: str) -> float:
        """Return the median speed of an engine, in times that of another one."""
        ratios = [theirs / own for theirs, own in zip(seconds[other], seconds[name], strict=True)]
        return round(statistics.median(ratios), 3)

    for name in names:
        report[name] = {"milliseconds_per_sentence": round(1000 * statistics.median(seconds[name]) / len(chosen), 3)}
        report[name] |= {f"speed_of_{other}": speed(name, other) for other in ("torch", PEER) if other in names}
        report[name]["same_outputs"] = sum(map(str.__eq__, outputs[name], outputs["torch"]))
    if "auto" in names:
        # The better engine of each round would be one that no choice can reach.
        best = min(("torch", "ctranslate2"), key=lambda name: statistics.median(seconds[name]))
        report["auto"] |= {"better_engine": best, "speed_of_better": speed("auto", best)}
    profile = {}
    if "torch" in names:
        profile = profile_steps(generators["torch"], chosen, options, max_new_tokens * -(-len(chosen) // batch_size))
    return {"sentences": len(chosen)} | report | profile


def profile_steps(generator: Generator, texts: list[str], options: dict, num_steps: int) -> dict[str, float]:
    """Return the calls of torch in a step, with those of the encoder, and the part of their time in matrix products."""
    with torch.profiler.profile() as profiler:
        generator.generate(texts, **options)
    calls = profiler.key_averages()
    seconds = sum(call.self_cpu_time_total for call in calls)
    products = sum(call.self_cpu_time_total for call in calls if call.key in PRODUCTS)
    number = sum(call.count for call in calls if call.key.startswith(("aten::", "mkl")))
    return {"calls_per_step": round(number / num_steps), "share_of_products": round(products / seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "models", nargs="*", default=["transformer-tiny", "transformer-base"], help="presets or folders"
    )
    parser.add_argument("--source", type=Path, help="sentences for trained models, one a line")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--beams", nargs="+", type=int, default=BEAMS)
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    parser.add_argument(
        "--engines", nargs="+", choices=(*ENGINES, PEER), default=["torch", "ctranslate2", "auto", PEER]
    )
    parser.add_argument("--max_new_tokens", type=int, default=20, help="tokens of a target [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each [%(default)s]")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    machine = describe_machine(1) | {"ctranslate2": metadata.version("ctranslate2")}
    report = {"machine": machine, "rounds": arguments.rounds, "models": {}}
    for name in arguments.models:
        settings = report["models"][Path(name).name] = {}
        with tempfile.TemporaryDirectory() as folder:
            peer = None
            if name in PRESETS:
                # Marian has this layout of positions.
                fields = {"logits_bias": True, "initializer_range": 0.2, "sinusoidal_layout": "half_split"}
                config = MetaphraseConfig(**PRESETS[name] | fields)
                model = save_random(config, Path(folder) / "model")
                texts = random_texts(max(SENTENCES.values()), config.vocab_size)
                if PEER in arguments.engines:
                    theirs = convert(model, Path(folder) / PEER, to="marian")
                    peer = AutoModelForSeq2SeqLM.from_pretrained(theirs, dtype=torch.float32).eval()
            else:
                model, texts = Path(name), list(iterate_lines(arguments.source))[: max(SENTENCES.values())]
            engines = [engine for engine in arguments.engines if engine != PEER]
            if find_obstacles(MetaphraseConfig.from_pretrained(model)):
                engines = ["torch"]
            for dtype in arguments.dtypes:
                generators = {
                    engine: Generator.from_pretrained(model, engine=engine, device="cpu", dtype=dtype)
                    for engine in engines
                }
                if peer is not None:
                    generators[PEER] = Generator(peer, TokenizerPair.from_pretrained(model))
                for num_beams in arguments.beams:
                    for batch_size in arguments.batches:
                        setting = f"{dtype}, beam {num_beams}, batch {batch_size}"
                        settings[setting] = measure(
                            generators, texts, num_beams, batch_size, arguments.rounds, arguments.max_new_tokens
                        )
                        print(name, setting, json.dumps(settings[setting]), flush=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
