"""Times converted models against the families' own classes: forward, training step, greedy and beam search.

    taskset -c 0 python benchmarks/families.py --output benchmarks/results/families_cpu.json

Both models hold the same random weights and read the same padded batch. They take turns, so that other load on the machine
affects both. The report holds medians of processor time and of the ratio. A new report replaces that of the same family.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from lengths import STACKS, T5_SMALL
from machine import describe_machine
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, set_seed

from metaphrase.conversion import FAMILIES, convert
from metaphrase.modeling import IGNORED_LABEL, MetaphraseForConditionalGeneration

VOCAB_SIZE = 8192
SOURCE, TARGET, BATCH = 40, 40, 16
NEW_TOKENS = 32
BART_LIKE = {"d_model": 512, "max_position_embeddings": 512, **STACKS}
BART_LIKE |= {"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
T5_LIKE = T5_SMALL | {"decoder_start_token_id": 0}


def make_pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return our converted model, and the family's own class with random weights."""
    fields = T5_LIKE if "t5" in name else BART_LIKE
    sizes = (
        {"src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE} if name == "fsmt" else {"vocab_size": VOCAB_SIZE}
    )
    theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **(fields | sizes)))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "theirs")
        convert(Path(folder) / "theirs", Path(folder) / "ours")
        ours = MetaphraseForConditionalGeneration.from_pretrained(Path(folder) / "ours")
    return ours, theirs


def make_batch(pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return a batch with lengths from half to the whole, a little less even than sorted batches."""
    batch = {}
    for side, length, filler in (("input_ids", SOURCE, pad_token_id), ("labels", TARGET, IGNORED_LABEL)):
        ids = torch.randint(10, VOCAB_SIZE, (BATCH, length))
        lengths = torch.randint(length // 2, length + 1, (BATCH, 1))
        batch[side] = ids.masked_fill(torch.arange(length) >= lengths, filler)
    batch["attention_mask"] = (batch["input_ids"] != pad_token_id).long()
    return batch


def make_work(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    decoder_input_ids = batch["labels"].clamp(min=model.config.pad_token_id)

    def forward():
        with torch.inference_mode():
            return model.eval()(**source, decoder_input_ids=decoder_input_ids).logits

    def step():
        model.train()
        loss = model(**source, labels=batch["labels"].clone(), decoder_input_ids=decoder_input_ids).loss
        loss.backward()
        model.zero_grad()

    def generate(num_beams: int):
        options = {"num_beams": num_beams, "do_sample": False}
        options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        return model.eval().generate(**source, **options)

    return {
        "forward": forward,
        "training step": step,
        "greedy search": lambda: generate(1),
        "beam search": lambda: generate(4),
    }


def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of both models for each kind of work, and our speed relative to their class."""
    set_seed(0)
    ours, theirs = make_pair(name)
    batch = make_batch(theirs.config.pad_token_id)
    work = [make_work(model, batch) for model in (ours, theirs)]
    report = {}
    for kind in work[0]:
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for side in (0, 1) if number % 2 else (1, 0):
                start = time.process_time()
                work[side][kind]()
                if number:  # the first round warms up
                    seconds[side].append(time.process_time() - start)
        ratios = [theirs / ours for ours, theirs in zip(*seconds, strict=True)]
        report[kind] = {
            "seconds": round(statistics.median(seconds[0]), 4),
            "seconds_of_own_class": round(statistics.median(seconds[1]), 4),
            "speed_of_own_class": round(statistics.median(ratios), 3),
        }
        print(f"{name:10} {kind:14} {report[kind]['speed_of_own_class']:6.2f} times as fast", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Random weights of mT5 give probabilities below 1e-38, and such numbers are a hundred times as slow on some processors.
    torch.set_flush_denormal(True)
    transformers.logging.set_verbosity_error()
    results = {name: measure(name, arguments.rounds) for name in arguments.families}
    if arguments.output is not None:
        sizes = {"vocab_size": VOCAB_SIZE, "batch": BATCH, "source": SOURCE, "target": TARGET, "new_tokens": NEW_TOKENS}
        about = {"rounds": arguments.rounds, "machine": describe_machine(arguments.threads)}
        report = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {}
        families = report.get("families", {}) if report.get("sizes") == sizes else {}
        families |= {name: about | {"work": result} for name, result in results.items()}
        report = {"sizes": sizes, "families": {name: families[name] for name in FAMILIES if name in families}}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
