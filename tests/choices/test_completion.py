import json
import logging
import re
from random import Random

import pytest
from pronunciations import PRONUNCIATIONS
from small_runs import write_pairs
from subcommands import execute
from tiny_generator import save_generator, tiny_generator

from benchmarks.tasks.commands import make_commands
from metaphrase import plugins
from metaphrase.choices import completion
from metaphrase.choices.completion import choose_columns, choose_dataset, complete, find_columns
from metaphrase.data import pairs
from metaphrase.data.token_budget import TokenBudgetStream
from metaphrase.inference import Generator
from metaphrase.scripts import tokenize, train
from metaphrase.training import corpora
from metaphrase.training.experiment import Experiment
from metaphrase.training.model_setup import make_model
from metaphrase.training.recipe.recipe import Recipe, learning_rate, load_recipe

SMALL = ["--model.hidden_size", "16", "--model.encoder_layers", "1", "--model.decoder_layers", "1", "--max_steps", "3"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.tsv", PRONUNCIATIONS[:300])
    return tmp_path


def completed(*words):
    words = ["--train_file", "pairs.tsv", "--output_dir", "run", *words]
    return completion.complete(load_recipe(None, words), is_dry_run=True)


def test_a_file_of_pairs_becomes_a_model(folder, caplog):
    with caplog.at_level("INFO"):
        # The time would decide whether beams are compared.
        execute(train, ["pairs.tsv", *SMALL, "--time_budget", "10m", "--num_beams", "1", "--disable_tqdm"])
    run = folder / "runs" / "pairs"
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.tokenizer_kind, recipe.target_tokenizer_kind, recipe.num_validation) == ("char", "word", 50)
    assert recipe.max_steps == 3 and recipe.model["hidden_size"] == 16 and recipe.time_budget is None
    assert "# sources are short strings, targets symbols" in (run / "recipe.yaml").read_text(encoding="utf-8")
    assert "sources are short strings, targets symbols" in caplog.text
    scores = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert scores["data"]["split"] == "validation" and set(scores["scores"]) == {"exact_match", "wer"}
    assert len(Generator.from_pretrained(run).generate(["bada"])) == 1
    # A resumed run takes over the choices, and their reasons stay.
    written = (run / "recipe.yaml").read_text(encoding="utf-8")
    execute(train, ["pairs.tsv", "--resume", "--max_steps", "4", "--disable_tqdm"])
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 4
    before, after = (re.findall("(?m)^#.*", text) for text in (written, (run / "recipe.yaml").read_text("utf-8")))
    assert before == after != []


def test_without_this_ring_a_file_of_pairs_trains_by_plain_defaults(folder, monkeypatch):
    for place in ("choose", "estimate", "choose_decoding"):
        monkeypatch.setitem(plugins.PLACES, place, "metaphrase.absent:function")
    execute(train, ["pairs.tsv", *SMALL, "--disable_tqdm"])
    recipe = load_recipe(folder / "runs" / "pairs" / "recipe.yaml")
    assert (recipe.max_tokens_per_batch, recipe.learning_rate) == (4096, learning_rate(16))
    assert recipe.lr_scheduler_type == "cosine" and recipe.is_open("metrics", "num_validation")
    for words in ("--dry_run", "--choose_decoding --num_validation 20"):
        with pytest.raises(ValueError, match=words.split()[0].removeprefix("--")):
            execute(train, ["pairs.tsv", *SMALL, "--output_dir", "other", *words.split()])


def test_what_was_prepared_is_what_the_chosen_recipe_says(folder):
    experiment, _ = completed(*SMALL, "--tokenizer_kind", "byte_bpe", "--joint_vocabulary")
    again = Experiment(experiment.recipe, is_dry_run=True).prepare()
    data = experiment.prepare()
    assert len(data.tokenizers.source) == len(again.tokenizers.source)
    assert data.encoded["train"].to_dict() == again.encoded["train"].to_dict()
    assert data.corpus.limits == (experiment.recipe.max_source_length, experiment.recipe.max_target_length)


def test_words_that_are_seen_in_few_places_are_shown_in_more(folder):
    nouns, verbs = ("cat", "dog", "bird", "fish"), ("sees", "likes", "hears")
    pairs = [
        (f"a {one} {verb} a {other} {place}", f"{verb} ( {one} , {other} , {place} )")
        for one in nouns
        for verb in verbs
        for other in nouns
        for place in ("here", "there", "inside", "outside", "above", "below")
    ]
    pairs += [("a shark sees a dog here", "sees ( shark , dog , here )")]
    write_pairs(folder / "pairs.tsv", pairs)
    options = ["--validation_file", "pairs.tsv", *SMALL]
    experiment, choices = completed(*options)
    assert experiment.recipe.augmentation == {"rare_words": 0.3}
    assert re.search(r"augmentation rare_words 0\.3 \(\d+ words are seen only", "\n".join(choices))
    texts = [
        experiment.prepare().encoded["train"].augmenter.change_texts(*pairs[0], Random(seed)) for seed in range(20)
    ]
    assert ("a shark sees a shark here", "sees ( shark , shark , here )") in texts
    # Pieces hold parts of words.
    experiment, choices = completed(*options, "--tokenizer_kind", "byte_bpe")
    assert experiment.recipe.augmentation == {}
    assert "augmentation none (pairs are recombined only if both sides are symbols)" in choices


def test_pairs_inside_others_make_longer_ones(folder, caplog):
    short = [pair for pair in make_commands() if len(pair[1].split()) <= 8]
    write_pairs(folder / "pairs.tsv", short)
    with caplog.at_level(logging.INFO):
        experiment, choices = completed("--num_beams", "1")
    recipe = experiment.recipe
    assert recipe.augmentation == {"recombination": 0.3} and recipe.keep_rare_words and recipe.model["dropout"] == 0
    assert re.search(r"recombination 0\.3 \(\d+ additions to sources predict known", "\n".join(choices))
    # Validation pairs cannot tell how the weights decode longer ones.
    assert (recipe.average_last, recipe.average_best, recipe.early_stopping_patience) == (3, None, None)
    assert re.search(r"Recombined \d+ of 3000 pairs, such as:", caplog.text)
    data = experiment.prepare().encoded["train"]
    data.set_epoch(1)
    assert max(len(pair["labels"]) for pair in data.__getitems__([*range(len(data))])) > 9


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (["a\tb", "c\td", "e\tf"], 0),
        # One of two sources would be more than a fifth of the pairs.
        ([f"{source}\tt{number}" for number in range(60) for source in "xy"], 0),
        ([f"x{number // 10}\tt{number}" for number in range(210)], 40),
    ],
    ids=["three pairs", "two sources", "groups of ten"],
)
def test_pairs_of_one_source_stay_together(lines, size, folder):
    (folder / "few.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    experiment, choices = completed(*SMALL, "--train_file", "few.tsv")
    assert experiment.recipe.num_validation == size and choices[0].startswith(f"num_validation {size} (")
    sources = [set(experiment.corpus.splits[split]["source"][:]) for split in experiment.corpus.splits]
    assert len(set().union(*sources)) == sum(map(len, sources))


def test_a_batch_that_memory_does_not_hold_is_split(folder, monkeypatch):
    monkeypatch.setattr(completion, "free_memory", lambda: 0)
    recipe = completed(*SMALL)[0].recipe
    budget = recipe.max_tokens_per_batch * recipe.gradient_accumulation_steps
    assert recipe.gradient_accumulation_steps > 1 and budget == 1024
    # Batches that were given stay.
    recipe = completed(*SMALL, "--max_tokens_per_batch", "512")[0].recipe
    assert (recipe.max_tokens_per_batch, recipe.gradient_accumulation_steps) == (512, 1)


def test_the_speed_is_that_of_the_network_that_is_trained(folder, monkeypatch):
    configs, measure = [], completion.estimate_recipe

    def record(recipe, data, **options):
        configs.append(make_model(recipe, data).config)
        return measure(recipe, data, **options)

    monkeypatch.setattr(completion, "estimate_recipe", record)
    experiment, _ = completed("--time_budget", "1h", "--model.hidden_size", "16")
    final = experiment.make_model().config
    shapes = {(config.hidden_size, config.encoder_layers) for config in configs}
    # With an open number of layers, two networks are compared.
    assert len(shapes) == 2 and (final.hidden_size, final.encoder_layers) in shapes
    assert {width for width, _ in shapes} == {16}


def test_a_tokenizer_that_exists_leaves_the_rest_to_be_chosen(folder):
    execute(tokenize, ["--files", "pairs.tsv", "--kind", "byte", "--output", "tokenizer"])
    recipe = completed("--tokenizer_name_or_path", "tokenizer")[0].recipe
    assert (recipe.tokenizer_kind, recipe.preset, recipe.num_validation) == (None, "metaphrase-tiny", 50)
    assert recipe.learning_rate > 1e-3 and recipe.metrics == ["exact_match", "wer"]
    longest = max(len(target.encode()) for _, target in PRONUNCIATIONS[:300])
    assert longest < recipe.max_target_length < 1.2 * longest + 24


def test_the_network_decides_when_pairs_are_not_read_beforehand(folder, tmp_path):
    tasks = ["--tasks.only", "{train_file: pairs.tsv}", "--train_file", "null"]
    experiment, choices = completed(*SMALL, *tasks)
    recipe = experiment.recipe
    assert recipe.learning_rate == learning_rate(16)
    assert (recipe.lr_scheduler_type, recipe.warmup_steps) == ("cosine", 0.1)
    assert "(0.002 was the best of three rates" in choices[1] and not experiment.corpus.splits
    # Values that were given stay, and a model that learned before keeps its own.
    given = completed(*tasks, "--learning_rate", "0.5")[0].recipe
    assert (given.learning_rate, given.max_tokens_per_batch) == (0.5, 4096)
    base = str(save_generator(tiny_generator(), tmp_path / "base"))
    assert completed(*tasks, "--model_name_or_path", base)[1] == []


def test_many_pairs_become_a_stream_with_the_choices_of_a_sample(folder, monkeypatch):
    whole = completed(*SMALL)[0].recipe
    monkeypatch.setattr(completion, "_MOST_READ", 200)
    monkeypatch.setattr(corpora, "SAMPLED_PAIRS", 250)
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 512)
    experiment, choices = completed(*SMALL, "--max_steps", "20")
    recipe, encoded = experiment.recipe, experiment.prepare().encoded
    assert choices[0].startswith("streaming true (the files hold about ") and recipe.num_validation > 0
    assert isinstance(encoded["train"], TokenBudgetStream) and len(encoded["validation"]) == recipe.num_validation
    names = ("preset", "tokenizer_kind", "target_tokenizer_kind", "metrics", "learning_rate", "lr_scheduler_type")
    assert [getattr(recipe, name) for name in names] == [getattr(whole, name) for name in names]
    assert experiment.train()["data"]["num_validation"] == recipe.num_validation
    # Epochs, which a stream lacks, and batches of pairs want all pairs to be read.
    for words in (
        *(["--num_train_epochs", "1"], ["--per_device_train_batch_size", "8"], ["--streaming", "false"]),
        # A sample must hold the pairs that are taken out, and few pairs of a large file are no stream.
        *(["--num_validation", "140"], ["--max_train_samples", "150"]),
    ):
        assert not completed(*SMALL, *words)[0].recipe.streaming


def test_a_bad_line_outside_of_the_sample_is_counted(folder, monkeypatch):
    monkeypatch.setattr(completion, "_MOST_READ", 200)
    monkeypatch.setattr(corpora, "SAMPLED_PAIRS", 110)
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 256)
    lines = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.tsv").write_text("".join([*lines[:200], "broken\n", *lines[200:]]), encoding="utf-8")
    stream = completed(*SMALL)[0].prepare().encoded["train"].read
    assert [*stream.chunks(0)] and stream.report.malformed == 1


def test_a_machine_keeps_its_own_paths_beside_the_choices_of_the_first():
    first, own = (Recipe(train_file=f"{name}/pairs.tsv", output_dir=f"{name}/run") for name in ("first", "own"))
    chosen = completion._from_first_process(own, lambda: first.choose("", num_beams=3))
    assert (chosen.train_file, chosen.output_dir, chosen.num_beams) == ("own/pairs.tsv", "own/run", 3)


def test_two_parallel_files_are_pairs_too(folder, capsys):
    for name, side in (("in.txt", 0), ("out.txt", 1)):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PRONUNCIATIONS[:300]), encoding="utf-8")
    execute(train, ["in.txt", "out.txt", *SMALL, "--dry_run"])
    assert capsys.readouterr().out.split("pairs")[1].split()[0] == "250"


@pytest.mark.parametrize("names", ["dmeo", "recipes/mine.yaml", "a b c", "train.en my.yaml", "pairs.txt"])
def test_words_that_are_no_data_are_refused(folder, names):
    (folder / "pairs.txt").write_text("a\tb\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=f"one of .*demo, .* got {names}"):
        train.find_data(names.split())


TEXTS = [
    f"{noun} {verb} {adverb}" for noun in ("dog", "cat", "bird") for verb in ("runs", "sees") for adverb in "abcdef"
]


def write(folder, source, target, splits):
    folder.mkdir()
    for split in splits:
        rows = [{"id": number, source: text, target: text[::-1]} for number, text in enumerate(TEXTS)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def chosen(name, **fields):
    return choose_dataset(Recipe().replace(dataset_name=name, **fields))


def test_splits_and_columns_of_a_folder_are_found(tmp_path):
    recipe = chosen(write(tmp_path / "folder", "document", "summary", ("train", "validation", "test")))
    assert (recipe.source_column, recipe.target_column) == ("document", "summary")
    assert (recipe.dataset_validation_split, recipe.dataset_test_split) == ("validation", "test")


def test_given_columns_and_splits_stay(tmp_path):
    folder = write(tmp_path / "folder", "en", "de", ("train", "validation", "test"))
    recipe = chosen(folder, source_column="de", target_column="en", num_validation=5)
    assert (recipe.source_column, recipe.target_column) == ("de", "en")
    assert recipe.dataset_validation_split is None and recipe.dataset_test_split == "test"
    with pytest.raises(ValueError, match=r"must be given for .*folder, which has id, en, de, got neither"):
        chosen(folder)
    with pytest.raises((FileNotFoundError, ConnectionError), match="me/other"):
        chosen("me/other")


FORMS = [(f"{stem}en", f"{stem}t", "3;SG;V;PRS") for stem in ("renn", "geh", "lach")]
FORMS += [(lemma, f"ge{form}", "V.PTCP;PST") for lemma, form, _ in FORMS]


@pytest.mark.parametrize(("order", "source"), [((0, 1, 2), [0, 2]), ((0, 2, 1), [0, 1])])
def test_columns_of_features_become_symbols(tmp_path, order, source):
    path = tmp_path / "forms.tsv"
    path.write_text("".join("\t".join(row[n] for n in order) + "\n" for row in FORMS * 20), encoding="utf-8")
    recipe = choose_columns(Recipe(train_file=str(path)))
    assert (recipe.source_column, recipe.target_column) == (source, 3 - source[1])
    fields = {"train_file": str(path), "output_dir": str(tmp_path / "run"), "use_cpu": True, "max_steps": 1}
    experiment, lines = complete(Recipe(**fields, num_validation=20, eval_strategy="no", save_strategy="no"))
    tokens = [";3", ";PRS", ";PST", ";SG", ";V", ";V.PTCP"]
    assert experiment.recipe.additional_special_tokens == tokens and any("6 features" in line for line in lines)
    tokenizers = experiment.prepare().tokenizers
    expected = tokenizers.source.convert_tokens_to_ids([*"gehen", ";PRS", ";V", "</s>"])
    # A line to decode has its columns in any order of the features.
    assert tokenizers.encode_sources(["gehen\tV;PRS", "gehen\tPRS;V", "gehen;PRS;V"]) == [expected] * 3
    assert choose_columns(Recipe(train_file=str(path), source_column=0, target_column=1)).source_column == 0


@pytest.mark.parametrize("text", ["a\tb\n", "A\tB\tC\n", "a\tV;PST\tV;PST\n", "a\tb\tc;d\n", "a\tb\tV;PST\na\tb\n", ""])
def test_other_columns_are_not_taken_for_features(tmp_path, text):
    (tmp_path / "a.tsv").write_text(text)
    assert choose_columns(Recipe(train_file=str(tmp_path / "a.tsv"))).is_open("source_column", "target_column")


def test_a_configuration_decides_the_direction_of_translations():
    row = {"translation": {"de": "ja", "en": "yes"}}
    assert find_columns(row, "wmt", "de-en") == ("de", "en")
    assert find_columns(row, "wmt", "en-de") == ("en", "de")
    for config in (None, "de", "en-fr"):
        with pytest.raises(ValueError, match="for wmt, which has de, en, got neither"):
            find_columns(row, "wmt", config)
    assert find_columns(dict.fromkeys(("text", "target", "source", "summary")), "news", None) == ("source", "target")
    # The names of TRL.
    assert find_columns(dict.fromkeys(("prompt", "chosen", "rejected")), "news", None) == ("prompt", "chosen")
    with pytest.raises(ValueError, match="which has text, article, summary"):
        find_columns(dict.fromkeys(("text", "article", "summary")), "news", None)


def test_a_name_is_a_recipe_before_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "corpus").mkdir()
    assert train.find_data(["demo"]) == (train.RECIPES / "demo.yaml", [])
    assert train.find_data(["corpus"]) == (None, ["--dataset_name", "corpus"])
    assert train.find_data(["me/pairs"]) == (None, ["--dataset_name", "me/pairs"])
