"""Times generation with a trained model: ours, transformers' class with the same weights, and CTranslate2.

    taskset -c 0 python benchmarks/generation.py runs/multi30k_tiny --source FOLDER/test_2016_flickr.en --peer bart

`results/README.md` holds the commands that trained the models. The model's options must fit the peer's family, into which
it is converted. Contestants take turns in each setting, and each round starts with another one, so that other load on the
machine affects all of them. One thread is measured in processor time, several in wall time: leave CTranslate2 out then,
since its threads keep spinning after its turn. The report counts the outputs that equal the first contestant's; with
`--reference` it also holds scores.

`--vocab_size` adds tokens to the model's vocabulary that no text has. The model writes almost the same text, at the cost
of the larger vocabulary.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from contestants import peak_bytes
from machine import describe_machine
from seeds import RESULTS
from transformers import AutoModelForSeq2SeqLM, CompileConfig, PreTrainedModel

from metaphrase.conversion import convert
from metaphrase.engines.ctranslate2_engine import CTranslate2Engine
from metaphrase.evaluation.metrics import compute_metrics
from metaphrase.inference import decode, quantize
from metaphrase.inference.batches import pad_sources
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.tokenization import TokenizerPair, iterate_lines

# Beams, and sources in a batch.
SETTINGS = {
    "greedy, batch 1": (1, 1),
    "greedy, batch 32": (1, 32),
    "beam 4, batch 32": (4, 32),
    "beam 5, batch 32": (5, 32),
}
FIRST = "transformers"
Contestant = Callable[[list[list[int]], int, int], list[list[int]]]


def options_of(num_beams: int) -> dict:
    # This is the only stopping rule that CTranslate2 shares.
    return {"num_beams": num_beams, "do_sample": False, "early_stopping": num_beams > 1}


def in_order(model: PreTrainedModel) -> Contestant:
    """Call `generate()` with batches in the order of the file."""

    def run(sources: list[list[int]], num_beams: int, batch_size: int) -> list[list[int]]:
        outputs = []
        for start in range(0, len(sources), batch_size):
            with torch.inference_mode():
                ids = model.generate(**pad_sources(sources[start : start + batch_size], model), **options_of(num_beams))
            outputs += ids[:, 1:].tolist()
        end = model.generation_config.eos_token_id
        return [row[: row.index(end) + 1] if end in row else row for row in outputs]

    return run


def by_length(model, **options) -> Contestant:
    """Call `decode()`, which makes batches of similar length."""

    def run(sources: list[list[int]], num_beams: int, batch_size: int) -> list[list[int]]:
        hypotheses = decode(model, sources, batch_size=batch_size, **options_of(num_beams), **options)
        return [best.ids for best, *_ in hypotheses]

    return run


def compiled(model: PreTrainedModel) -> Contestant:
    """Use a static cache and compiled steps, in batches of similar length, whose shapes change."""
    config = CompileConfig(mode=None, dynamic=True) if model.device.type == "cpu" else CompileConfig()
    # By default transformers compiles only on accelerators.
    config._compile_all_devices = True
    return by_length(model, cache_implementation="static", compile_config=config)


def quantized(folder: Path) -> Contestant:
    model = MetaphraseForConditionalGeneration.from_pretrained(folder, dtype="float32")
    quantize(model)
    return by_length(model)


def in_ctranslate2(folder: Path, compute_type: str) -> Contestant:
    return by_length(CTranslate2Engine.from_pretrained(folder, device="cpu", dtype=compute_type))


def load(model: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    return model.from_pretrained(folder, dtype="float32").eval()


# Each takes the folders of our model and of the peer.
CONTESTANTS: dict[str, Callable[[Path, Path], Contestant]] = {
    FIRST: lambda ours, peer: in_order(load(AutoModelForSeq2SeqLM, peer)),
    "transformers, by length": lambda ours, peer: by_length(load(AutoModelForSeq2SeqLM, peer)),
    "metaphrase, in order": lambda ours, peer: in_order(load(MetaphraseForConditionalGeneration, ours)),
    "metaphrase": lambda ours, peer: by_length(load(MetaphraseForConditionalGeneration, ours)),
    "metaphrase, static": lambda ours, peer: by_length(
        load(MetaphraseForConditionalGeneration, ours), cache_implementation="static", disable_compile=True
    ),
    "metaphrase, compiled": lambda ours, peer: compiled(load(MetaphraseForConditionalGeneration, ours)),
    "metaphrase, int8": lambda ours, peer: quantized(ours),
    "ctranslate2": lambda ours, peer: in_ctranslate2(ours, "float32"),
    "ctranslate2, int8": lambda ours, peer: in_ctranslate2(ours, "int8"),
}


def measure(
    contestants: dict[str, Contestant], sources: list[list[int]], setting: tuple[int, int], rounds: int, threads: int
) -> tuple[dict[str, dict], dict[str, list[list[int]]]]:
    """Return each contestant's report for one setting of beams and batch, and its outputs."""
    num_beams, batch_size = setting
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    outputs: dict[str, list[list[int]]] = {}
    names = list(contestants)
    # Warm up: weights are prepacked after some calls.
    for name in names:
        contestants[name](sources[: max(16, 2 * batch_size)], num_beams, batch_size)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            outputs[name] = contestants[name](sources, num_beams, batch_size)
            seconds[name].append(clock() - start)
        print(f"{num_beams} beams, batch {batch_size}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    report = {}
    for name in names:
        middle = statistics.median(seconds[name])
        report[name] = {
            "seconds": round(middle, 3),
            "sentences_per_second": round(len(sources) / middle, 2),
            "tokens_per_second": round(sum(map(len, outputs[name])) / middle, 1),
            "milliseconds_per_sentence": round(1000 * middle / len(sources), 2),
        }
        if FIRST in seconds:
            ratios = [theirs / own for theirs, own in zip(seconds[FIRST], seconds[name], strict=True)]
            same = sum(a == b for a, b in zip(outputs[name], outputs[FIRST], strict=True))
            report[name] |= {"speed_of_transformers": round(statistics.median(ratios), 3), "same_outputs": same}
    return report, outputs


def show(setting: str, report: dict[str, dict]) -> None:
    print(f"\n{setting}")
    for name, result in report.items():
        ratio = f"{result['speed_of_transformers']:6.2f} x" if "speed_of_transformers" in result else ""
        score = f"{result['bleu']:7.2f} BLEU" if "bleu" in result else ""
        print(f"  {name:26} {result['sentences_per_second']:9.2f} sentences/s {ratio} {score}", flush=True)


def with_vocabulary(folder: Path, vocab_size: int, target: Path) -> Path:
    """Write the same model with a larger vocabulary, and return its folder."""
    model = load(MetaphraseForConditionalGeneration, folder)
    torch.manual_seed(0)
    # transformers draws new embeddings with the mean and covariance of the old ones.
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(target)
    TokenizerPair.from_pretrained(folder).save_pretrained(target)
    return target


def peak_of(name: str, arguments: argparse.Namespace) -> int:
    """Return the peak memory in MiB of a process with one contestant, in the setting with most beams."""
    command = [sys.executable, __file__, str(arguments.model), "--source", str(arguments.source)]
    command += ["--peer", arguments.peer, "--lines", str(min(arguments.lines, 128)), "--memory_of", name]
    command += ["--vocab_size", str(arguments.vocab_size)] if arguments.vocab_size else []
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return round(json.loads(output.splitlines()[-1])["peak_bytes"] / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a trained Metaphrase model")
    parser.add_argument("--source", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--reference", type=Path, help="references, for a score")
    parser.add_argument("--peer", default="bart", help="family of transformers' class [%(default)s]")
    parser.add_argument("--lines", type=int, default=256, help="sentences, spread over the file [%(default)s]")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument(
        "--vocab_size", type=int, help="size of the vocabulary, padded with unused tokens [the model's]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="threads of each [%(default)s]")
    parser.add_argument("--memory_of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file [benchmarks/results/generation_MODEL(_VOCAB_SIZE).json]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()

    tokenizers = TokenizerPair.from_pretrained(arguments.model)
    texts = list(iterate_lines(arguments.source))
    step = max(1, len(texts) // arguments.lines)
    chosen = range(0, len(texts), step)[: arguments.lines]
    sources = tokenizers.encode_sources([texts[index] for index in chosen])
    names = [arguments.memory_of] if arguments.memory_of else arguments.contestants
    with tempfile.TemporaryDirectory() as folder:
        ours, peer = arguments.model, Path(folder) / "peer"
        if arguments.vocab_size:
            ours = with_vocabulary(arguments.model, arguments.vocab_size, Path(folder) / "ours")
        convert(ours, peer, to=arguments.peer)
        contestants = {name: CONTESTANTS[name](ours, peer) for name in names}
        parameters = load(MetaphraseForConditionalGeneration, ours).num_parameters()
    if arguments.memory_of:
        contestants[arguments.memory_of](sources, *SETTINGS["beam 5, batch 32"])
        print(json.dumps({"peak_bytes": peak_bytes()}))
        return

    results = {}
    for setting in arguments.settings:
        # Single sentences take long.
        few = sources[:: 1 if SETTINGS[setting][1] > 1 else 4]
        results[setting], outputs = measure(contestants, few, SETTINGS[setting], arguments.rounds, arguments.threads)
        if arguments.reference and len(few) == len(sources):
            lines = list(iterate_lines(arguments.reference))
            references = [lines[index] for index in chosen]
            for name, ids in outputs.items():
                scores = compute_metrics(tokenizers.decode_targets(ids), references, ["bleu"])
                results[setting][name]["bleu"] = round(scores["bleu"]["score"], 2)
        show(setting, results[setting])
    report = {
        "model": arguments.model.name,
        "vocab_size": arguments.vocab_size or tokenizers.target.vocab_size,
        "parameters": parameters,
        "peer": arguments.peer,
        "sentences": len(sources),
        "rounds": arguments.rounds,
        "machine": describe_machine(arguments.threads),
        "peak_mib": {name: peak_of(name, arguments) for name in names},
        "settings": results,
    }
    size = f"_{arguments.vocab_size}" if arguments.vocab_size else ""
    output = arguments.output or RESULTS / f"generation_{arguments.model.name}{size}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
