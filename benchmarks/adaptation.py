"""Trains a small Llama on the Spanish side of Tatoeba, adapts it, and compares it with the same network from scratch.

    python benchmarks/adaptation.py --data_dir CORPORA --core 0

All of it runs on one core with one thread: the Llama reads Spanish text, then both networks read the same pairs for the same
time, with the fields that `metaphrase train` chooses. The Spanish of the test and validation pairs is left out. A second call
goes on with the Llama and the seeds that are in the folder and in the output file.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from machine import describe_machine
from seeds import RESULTS
from transformers import LlamaConfig, LlamaForCausalLM

from metaphrase.conversion import adapt
from metaphrase.evaluation.metrics import write_metrics
from metaphrase.modeling import MetaphraseConfig
from metaphrase.ops.cpu_setup import has_fast_bfloat16
from metaphrase.tokenization import TokenizerPair

CORPUS = Path("tatoeba_en_es", "en_es.tsv")
SIZES = {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6, "num_attention_heads": 5}
SIZES |= {"max_position_embeddings": 256, "tie_word_embeddings": True}
VOCAB_SIZE = 8000
PAIRS = {"test": 1000, "validation": 500, "train": 10_000}
# Training of the Llama: blocks in a batch, tokens in a block, learning rate, share of warmup.
BLOCKS, BLOCK_TOKENS, RATE, WARMUP = 16, 128, 1e-3, 0.05
KINDS = ("scratch", "adapted")
# The fields in which the adapted network differs from the preset.
OWN_FIELDS = ("hidden_size", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
OWN_FIELDS += ("encoder_ffn_dim", "decoder_ffn_dim", "scale_embedding", "tie_word_embeddings", "dropout")


def split_pairs(data_dir: Path, folder: Path) -> list[str]:
    """Write the pairs of each split, and return the Spanish sentences that are in no validation or test pair."""
    lines = sorted({*(data_dir / CORPUS).read_text(encoding="utf-8").splitlines()})
    random.Random(1).shuffle(lines)
    held_out: set[str] = set()
    for split, count in PAIRS.items():
        # Equal sources or targets stay on one side.
        free = [line for line in lines if not held_out & {*line.split("\t")}]
        (folder / f"{split}.tsv").write_text("".join(f"{line}\n" for line in free[:count]), encoding="utf-8")
        if split != "train":
            held_out |= {side for line in free[:count] for side in line.split("\t")}
    targets = dict.fromkeys(line.split("\t")[1] for line in lines)
    return [target for target in targets if target not in held_out]


def train_llama(texts: list[str], folder: Path, minutes: float) -> dict:
    """Train a Llama with its tokenizer for some minutes, and return what is known of the run."""
    pairs = [line.split("\t") for line in (folder / "train.tsv").read_text(encoding="utf-8").splitlines()]
    tokenizers = TokenizerPair.train(texts, [source for source, _ in pairs], vocab_size=VOCAB_SIZE, show_progress=False)
    fields = tokenizers.config_fields()
    ids = {name: fields[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **ids))
    generator = np.random.default_rng(1)
    rows = tokenizers.encode_targets(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    start, updates, losses = time.perf_counter(), 0, []
    stream: list[int] = []
    while (share := (time.perf_counter() - start) / (60 * minutes)) < 1:
        while len(stream) < BLOCKS * BLOCK_TOKENS:
            for index in generator.permutation(len(rows)):
                stream += [ids["bos_token_id"], *rows[index]]
        batch = torch.tensor(stream[: BLOCKS * BLOCK_TOKENS]).view(BLOCKS, BLOCK_TOKENS)
        del stream[: BLOCKS * BLOCK_TOKENS]
        # The cosine of the share of time, so that a slow machine ends with a low rate, too.
        optimizer.param_groups[0]["lr"] = RATE * min(share / WARMUP, (1 + math.cos(math.pi * share)) / 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bfloat16()):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        losses.append(loss.item())
        if updates % 20 == 0:
            print(f"{share:.0%} update {updates} loss {np.mean(losses[-20:]):.3f}", flush=True)
    model.save_pretrained(folder / "llama")
    tokenizers.save_pretrained(folder / "llama")
    return {
        "parameters": model.num_parameters(),
        "sentences": len(texts),
        "tokens": sum(map(len, rows)),
        "updates": updates,
        "tokens_per_update": BLOCKS * BLOCK_TOKENS,
        "loss": round(float(np.mean(losses[-50:])), 3),
    }


def run(words: list[str], log: Path, core: int | None) -> None:
    """Run a verb with its messages in a file."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as stream:
        command = [*pinned, sys.executable, "-m", "metaphrase.scripts", *words]
        subprocess.run(command, stdout=stream, stderr=stream, env=environment, check=True)


def train(kind: str, seed: str, minutes: float, folder: Path, core: int | None) -> dict:
    """Train the adapted network, or the same network from scratch, and return its scores."""
    output = folder / f"{kind}_{seed}"
    words = ["train", str(folder / "train.tsv"), "--seed", seed, "--time_budget", f"{minutes:g}m"]
    words += ["--output_dir", str(output), "--metrics", "bleu", "chrf"]
    words += [word for split in ("validation", "test") for word in (f"--{split}_file", str(folder / f"{split}.tsv"))]
    if kind == "adapted":
        words += ["--model_name_or_path", str(folder / "adapted")]
    else:
        config = MetaphraseConfig.from_pretrained(folder / "adapted")
        words += ["--tokenizer_name_or_path", str(folder / "adapted"), "--preset", "metaphrase-tiny"]
        words += [word for name in OWN_FIELDS for word in (f"--model.{name}", str(getattr(config, name)).lower())]
    run(words, folder / f"{kind}_{seed}.log", core)
    metrics, state = (
        json.loads((output / name).read_text(encoding="utf-8")) for name in ("metrics.json", "trainer_state.json")
    )
    scores = {name: round(score["score"], 2) for name, score in metrics["scores"].items()}
    recipe = yaml.safe_load((output / "recipe.yaml").read_text(encoding="utf-8"))
    fields = {name: recipe.get(name) for name in ("learning_rate", "max_tokens_per_batch", "label_smoothing_factor")}
    return {"kind": kind, "seed": seed, "fields": fields, "updates": state["global_step"], "scores": scores}


def compare(seed: str, folder: Path, core: int | None) -> dict:
    """Return how the adapted network of a seed differs from the one from scratch, with tests of significance."""
    test = [line.split("\t")[1] for line in (folder / "test.tsv").read_text(encoding="utf-8").splitlines()]
    reference, output = folder / "reference.txt", folder / f"compare_{seed}.json"
    reference.write_text("".join(f"{text}\n" for text in test), encoding="utf-8")
    systems = [str(folder / f"{kind}_{seed}" / "test_predictions.txt") for kind in KINDS]
    words = ["compare", *systems, "--target", str(reference), "--metrics", "bleu", "--output", str(output)]
    run([*words, "--names", *KINDS], folder / f"compare_{seed}.log", core)
    return json.loads(output.read_text(encoding="utf-8"))["scores"]["bleu"]["systems"][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of the public corpora")
    parser.add_argument("--llama_minutes", type=float, default=20, help="time of the Llama [%(default)s]")
    parser.add_argument("--minutes", type=float, default=15, help="time of each encoder-decoder [%(default)s]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="%(default)s")
    parser.add_argument("--core", type=int, help="processor core to pin to")
    folder = Path(tempfile.gettempdir(), "metaphrase_adaptation")
    parser.add_argument("--folder", type=Path, default=folder, help="folder for models and logs [%(default)s]")
    parser.add_argument("--output", type=Path, default=RESULTS / "adaptation.json", help="JSON file [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    folder, output = arguments.folder, arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "adapted").is_dir():
        texts = split_pairs(arguments.data_dir, folder)
        report = {"machine": describe_machine(1), "runs": [], "comparisons": {}}
        report["minutes"] = {"llama": arguments.llama_minutes, "each": arguments.minutes}
        report["llama"] = train_llama(texts, folder, arguments.llama_minutes)
        adapt(folder / "llama", folder / "adapted")
        write_metrics(output, report)
    report = json.loads(output.read_text(encoding="utf-8"))
    print(report["llama"], flush=True)
    for seed in map(str, arguments.seeds):
        if seed in report["comparisons"]:
            continue
        for kind in KINDS:
            report["runs"].append(train(kind, seed, arguments.minutes, folder, arguments.core))
            print(report["runs"][-1], flush=True)
        report["comparisons"][seed] = compare(seed, folder, arguments.core)
        write_metrics(output, report)


if __name__ == "__main__":
    main()
