import pytest
from transformers import GenerationConfig

from metaphrase.conversion.checkpoints import DEFAULT_SHARD_SIZE
from metaphrase.conversion.families import FAMILIES
from metaphrase.decoding.minimum_bayes_risk import UTILITIES
from metaphrase.evaluation.metrics import DEFAULT_METRICS, METRICS
from metaphrase.inference import ENGINES
from metaphrase.inference.batches import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH
from metaphrase.scripts.convert import EXPORTS
from metaphrase.scripts.explain import DEFAULT_OUTPUTS
from metaphrase.scripts.parsers import MAX_HELP_LINES, SUBCOMMANDS, chosen_generation_options, make_parser, parse
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.texts.plan import PATTERNS
from metaphrase.texts.whole_texts import FORMATS as TEXT_FORMATS
from metaphrase.tokenization.texts import MAX_LINE_CHARACTERS
from metaphrase.tokenization.tokenizer_trainer import DEFAULT_VOCAB_SIZE, KINDS_THAT_FILL_A_VOCABULARY, TOKENIZER_KINDS
from metaphrase.training.checkpoints import DEFAULT_METRIC


def chosen(*words):
    return chosen_generation_options(parse("generate", ["some/model", *words]))


def test_every_option_is_one_of_transformers():
    assert set(GENERATION_OPTIONS) <= vars(GenerationConfig()).keys()


def test_names_and_defaults_are_those_of_the_rooms():
    """The parsers repeat them, because importing the rooms takes seconds."""
    sizes = {"batch_size": DEFAULT_BATCH_SIZE, "max_tokens_per_batch": DEFAULT_MAX_TOKENS_PER_BATCH}
    sizes |= {"max_line_characters": MAX_LINE_CHARACTERS}
    assert sizes.items() <= {name: make_parser("generate").get_default(name) for name in sizes}.items()
    assert make_parser("compare").get_default("metrics") == list(DEFAULT_METRICS)
    assert make_parser("convert").get_default("max_shard_size") == DEFAULT_SHARD_SIZE
    assert make_parser("convert").parse_args([__file__, "out"]).source == __file__
    expected = {"convert": FAMILIES, "attention": ["|".join(DEFAULT_OUTPUTS)], "export": ["|".join(EXPORTS)]}
    expected |= {"generate": [*ENGINES, *UTILITIES, *TEXT_FORMATS, *PATTERNS], "average": [f"[{DEFAULT_METRIC}]"]}
    size = f"[{DEFAULT_VOCAB_SIZE} for {', '.join(KINDS_THAT_FILL_A_VOCABULARY)}; else"
    expected |= {"tokenize": [*TOKENIZER_KINDS, size], "evaluate": [f"scores: {', '.join(METRICS)} ["]}
    for subcommand, names in expected.items():
        said = " ".join(make_parser(subcommand).format_help(is_full=True).split())
        assert [name for name in names if name not in said] == []


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_fits_a_screen_and_names_all_options(subcommand, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = make_parser(subcommand)
    short, full = parser.format_help(), parser.format_help(is_full=True)
    assert len(short.splitlines()) <= MAX_HELP_LINES
    for action in parser._actions:
        assert (action.option_strings or [action.metavar or action.dest])[0] in short
        assert action.help is None or action.help.split("%")[0].split()[0] in full


# The beams of the model are for search.
SAMPLING = {"do_sample": True, "num_beams": 1}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--num_beams 4 --length_penalty 0.6", {"num_beams": 4, "length_penalty": 0.6}),
        # Booleans may be bare or have a value.
        ("--do_sample", {"do_sample": True}),
        ("--do_sample true", {"do_sample": True}),
        ("--do_sample no", {"do_sample": False}),
        ("--early_stopping", {"early_stopping": True}),
        ("--early_stopping no", {"early_stopping": False}),
        ("--early_stopping never", {"early_stopping": "never"}),
        # An option of sampling turns it on, except against a clear word.
        *((f"--{name} 1", {name: 1, **SAMPLING}) for name in ("temperature", "top_p", "min_p", "typical_p")),
        *((f"--{name} 1", {name: 1, **SAMPLING}) for name in ("top_k", "epsilon_cutoff", "eta_cutoff", "top_h")),
        ("--top_p 1 --num_beams 2", {"top_p": 1, "num_beams": 2, "do_sample": True}),
        ("--top_k 3 --do_sample no", {"top_k": 3, "do_sample": False}),
    ],
)
def test_only_what_was_given_is_chosen(words, expected):
    assert chosen(*words.split()) == expected == complete_sampling(expected)
    assert type(chosen("--max_new_tokens", "5")["max_new_tokens"]) is int


def test_a_dash_is_standard_output_of_generate_and_no_file_of_other_subcommands():
    assert parse("generate", ["some/model", "--output", "-"]).output is None
    for subcommand, words in {
        "explain": "m --source a --output -",
        "convert": "m -",
        "average": "a --output -",
    }.items():
        with pytest.raises(ValueError, match="`output` must be a path, got '-'"):
            parse(subcommand, words.split())
