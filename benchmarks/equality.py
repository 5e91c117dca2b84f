"""Compares the output of a trained model with that of transformers' class with the same weights, token for token.

    metaphrase train multi30k_en_de --data_dir FOLDER --output_dir runs/multi30k_bart --preset transformer-tiny \\
        --vocab_size 8000 --model.position_embedding_type learned --model.embedding_norm true \\
        --max_tokens_per_batch 4096 --num_train_epochs 5
    python benchmarks/equality.py runs/multi30k_bart --peer bart --source FOLDER/test_2016_flickr.en

The model's options must fit the peer's family, into which it is converted: use `--preset marian` for `--peer marian`, and
a smaller `--preset t5-small` with as many heads on both sides for `--peer t5`. Both models get the same batches in float32,
for greedy search and for each number of beams, length penalty and stopping rule. Settings in the output file are skipped, so
several processes can share the work: `--num_beams 1 2 3`.

Different targets are a tie if the model finds them equally probable up to rounding, or if both models write the same in
float64. Rounding, and not the search, decides between them.
"""

import argparse
import copy
import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from machine import describe_machine
from seeds import RESULTS
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from metaphrase.conversion import convert
from metaphrase.inference import Hypothesis, decode
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.tokenization import TokenizerPair, iterate_lines

BEAMS = range(1, 9)
LENGTH_PENALTIES = (0.6, 0.8, 1.0, 1.2, 1.4)
EARLY_STOPPING = (False, True, "never")
# Largest difference of scores in a tie. A score is about the mean log-probability of a token.
TIE = 1e-5


def settings_of(num_beams: int, length_penalties: Iterable[float], early_stopping: Iterable[bool | str]) -> list[dict]:
    """Return options of `generate()`. Greedy search has no length penalty and no early stopping."""
    if num_beams == 1:
        return [{"num_beams": 1}]
    names = ("num_beams", "length_penalty", "early_stopping")
    return [
        dict(zip(names, (num_beams, *rest), strict=True))
        for rest in itertools.product(length_penalties, early_stopping)
    ]


def write(model: PreTrainedModel, sources: list[list[int]], options: dict) -> list[Hypothesis]:
    return [best for best, *_ in decode(model, sources, do_sample=False, return_scores=True, **options)]


def gaps_of(ours: list[Hypothesis], theirs: list[Hypothesis]) -> dict[int, float]:
    """Return the difference of scores of each source with different targets, by the source's index."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {index: abs(our.score - their.score) for index, (our, their) in pairs if our.ids != their.ids}


def compare(models: tuple[PreTrainedModel, PreTrainedModel], sources: list[list[int]], options: dict) -> dict:
    """Count targets that are the same, ties and different, and return the largest difference of scores."""
    gaps = gaps_of(*(write(model, sources, options) for model in models))
    far = [sources[index] for index, gap in gaps.items() if gap > TIE]
    exact = gaps_of(*(write(copy.deepcopy(model).double(), far, options) for model in models)) if far else {}
    different = sum(gap > TIE for gap in exact.values())
    return {
        "same": len(sources) - len(gaps),
        "ties": len(gaps) - different,
        "different": different,
        "largest_gap": max(gaps.values(), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a trained Metaphrase model")
    parser.add_argument("--source", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--peer", required=True, help="family of transformers' class, such as bart, t5 or marian")
    parser.add_argument("--num_beams", type=int, nargs="+", default=list(BEAMS), help="numbers of beams [1 to 8]")
    parser.add_argument(
        "--length_penalty", type=float, nargs="+", default=list(LENGTH_PENALTIES), help="length penalties [0.6 to 1.4]"
    )
    parser.add_argument(
        "--early_stopping",
        type=json.loads,
        nargs="+",
        default=list(EARLY_STOPPING),
        metavar="JSON",
        help='stopping rules [false true "never"]',
    )
    parser.add_argument("--lines", type=int, help="number of lines to read [all]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [%(default)s]")
    parser.add_argument("--output", type=Path, help="JSON file [benchmarks/results/equality_PEER.json]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()

    lines = list(iterate_lines(arguments.source))[: arguments.lines]
    sources = TokenizerPair.from_pretrained(arguments.model).encode_sources(lines)
    with tempfile.TemporaryDirectory() as folder:
        convert(arguments.model, Path(folder) / "peer", to=arguments.peer)
        theirs = AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "peer", dtype="float32").eval()
    ours = MetaphraseForConditionalGeneration.from_pretrained(arguments.model, dtype="float32").eval()
    about = {"model": arguments.model.name, "peer": type(theirs).__name__, "sentences": len(lines), "tie": TIE}
    output = arguments.output or RESULTS / f"equality_{arguments.peer}.json"
    chosen = (settings_of(beams, arguments.length_penalty, arguments.early_stopping) for beams in arguments.num_beams)
    for options in itertools.chain.from_iterable(chosen):
        name = json.dumps(options)
        if name in read_settings(output, about):
            continue
        result = compare((ours, theirs), sources, options)
        print(f"{name}: {result}", flush=True)
        # Another process may have added settings.
        settings = {**read_settings(output, about), name: result}
        totals = {key: sum(counts[key] for counts in settings.values()) for key in ("same", "ties", "different")}
        report = about | {"machine": describe_machine(arguments.threads), "totals": totals, "settings": settings}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read_settings(output: Path, about: dict) -> dict[str, dict]:
    """Return the results in an output file.

    Raises:
        ValueError: If they are of another model or of other sentences.
    """
    if not output.is_file():
        return {}
    report = json.loads(output.read_text(encoding="utf-8"))
    if any(report[name] != value for name, value in about.items()):
        raise ValueError(
            f"{output} holds results of another model or other sentences: remove it, or name another --output."
        )
    return report["settings"]


if __name__ == "__main__":
    main()
