"""`metaphrase generate MODEL`: write one target line for each source line, in the same order."""

import argparse
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence

from transformers import set_seed

from metaphrase.inference import Generator, GeneratorPool
from metaphrase.inference.line_files import (
    ResumedFile,
    check_files,
    check_regular,
    count_lines,
    format_targets,
    open_output,
    read_lines,
)
from metaphrase.inference.minimum_bayes_risk import UTILITIES
from metaphrase.scripts.console import check_dependents, verb_parser, warn_of_lengths
from metaphrase.scripts.options import (
    add_ensemble_options,
    add_generation_options,
    add_model_options,
    chosen_generation_options,
    chosen_loading_options,
    chosen_models,
    given_options,
)

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = verb_parser("generate", "Write one target line for each source line, in the same order.")
    add_model_options(parser)
    add_ensemble_options(parser)
    parser.add_argument("--input", metavar="FILE", help="file with one source in each line, UTF-8 [standard input]")
    text = "file to write; an existing file is replaced [standard output]"
    parser.add_argument("--output", metavar="FILE", help=text)
    text = "resume a stopped run of the same command; start from scratch if there is no output yet"
    parser.add_argument("--resume", action="store_true", default=None, help=text)
    text = "sources that are sorted and decoded together [%(default)s]"
    parser.add_argument("--chunk_size", "--window", type=int, default=4096, help=text)
    parser.add_argument(
        "--num_processes",
        type=int,
        default=1,
        help="processes that decode chunks in parallel [%(default)s]; they share the cores of a CPU, or take the "
        "accelerators in turn",
    )
    text = "write `index ||| target ||| score` for every target; implied by num_return_sequences above 1"
    parser.add_argument("--n_best", action="store_true", help=text)
    add_generation_options(parser)
    group = parser.add_argument_group("speculative and minimum Bayes risk decoding")
    text = "smaller model that drafts tokens for the model to check: same output, less time"
    group.add_argument("--assistant_model", metavar="MODEL", help=text)
    for name, text in (
        ("num_assistant_tokens", "tokens in a draft"),
        ("mbr_candidates", "number of samples for minimum Bayes risk decoding"),
        ("mbr_references", "number of pseudo-references [the candidates themselves]"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="INT", help=text)
    text = "similarity of a candidate and a pseudo-reference [chrf]"
    group.add_argument("--mbr_utility", choices=list(UTILITIES), help=text)
    group = parser.add_argument_group("phrases")
    text = "phrase that every target contains; of several phrases one is enough; may be given several times"
    group.add_argument("--must_contain", action="append", nargs="+", metavar="PHRASE", help=text)
    text = "phrases that no target contains"
    group.add_argument("--never_contain", action="extend", nargs="+", metavar="PHRASE", help=text)
    return parser


@contextlib.contextmanager
def load(arguments: argparse.Namespace, options: dict) -> Iterator[Generator | GeneratorPool]:
    """Load a generator, an ensemble or a pool of processes. A draft model goes to the pool, or into `options`."""
    names, loading = chosen_models(arguments), chosen_loading_options(arguments)
    if arguments.num_processes > 1:
        loading |= {"num_processes": arguments.num_processes, "assistant_model": arguments.assistant_model}
        with GeneratorPool(names, **loading) as pool:
            yield pool
        return
    if arguments.assistant_model is not None:
        options["assistant_model"] = Generator.from_pretrained(arguments.assistant_model, **loading)
    yield Generator.from_pretrained(names, **loading)


def main(words: Sequence[str]) -> None:
    arguments = make_parser().parse_args(words)
    for name in ("chunk_size", "num_processes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(arguments, name)}.")
    needs = {"mbr_references": "mbr_candidates", "mbr_utility": "mbr_candidates", "resume": "output"}
    check_dependents(arguments, num_assistant_tokens="assistant_model", ensemble_mean="ensemble", **needs)
    check_files(arguments.input, arguments.output)
    if arguments.resume:
        check_regular(arguments.output)
    options = chosen_generation_options(arguments)
    options |= given_options(arguments, ("must_contain", "never_contain", "num_assistant_tokens"))
    n_best = arguments.n_best or options.get("num_return_sequences", 1) > 1
    if not n_best and arguments.mbr_candidates is None:
        # Override the model's own setting: one line out for each line in.
        options.setdefault("num_return_sequences", 1)
    set_seed(arguments.seed)
    with load(arguments, options) as generator:
        write(generator, arguments, options, n_best)


def write(generator: Generator | GeneratorPool, arguments: argparse.Namespace, options: dict, n_best: bool) -> None:
    """Decode the input into the output, and log counts and speed."""
    risk, num_targets = None, 1
    if arguments.mbr_candidates is None:
        num_targets = generator.num_targets(**options)
    else:
        risk = {"num_candidates": arguments.mbr_candidates, "num_references": arguments.mbr_references}
        risk["utility"] = arguments.mbr_utility or "chrf"
    if arguments.resume:
        layout = {"num_targets": num_targets, "with_scores": n_best, "chunk_size": arguments.chunk_size}
        opened = ResumedFile(arguments.output, **layout)
    else:
        opened = open_output(arguments.output)
    count, started = 0, time.perf_counter()
    with opened as output:
        first = output.first_source
        if first:
            logger.info("Resuming %s at line %d.", arguments.output, first + 1)
        results = generator.generate_stream(
            itertools.islice(read_lines(arguments.input), first, None),
            risk=risk,
            show_progress=None,
            chunk_size=arguments.chunk_size,
            first_chunk=first // arguments.chunk_size,
            total=count_lines(arguments.input),
            return_scores=n_best,
            seed=arguments.seed,
            **options,
        )
        for index, candidates in enumerate(results, start=first):
            output.write(format_targets(index, candidates, n_best))
            count += 1
        output.finish()
    seconds = time.perf_counter() - started
    logger.info("%d lines in %.1f seconds, %.1f lines per second.", count, seconds, count / seconds)
    warn_of_lengths(generator, count)
    if generator.num_drafted:
        share = generator.num_accepted / generator.num_drafted
        logger.info("Of %d drafted tokens %.1f %% were accepted.", generator.num_drafted, 100 * share)
