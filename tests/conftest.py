import gc
import logging
import os
import shlex
import shutil
import warnings
from unittest.mock import patch

import pytest
import small_runs
import torch
from job_server import free_port
from launched_runs import launch, words_of
from small_trainers import small_pairs
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator
from tiny_models import tiny_model
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Seq2SeqTrainer, masking_utils, pipeline
from transformers.integrations import flex_attention as flex_integration

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Exclude imported modules from garbage collection. A Trainer collects garbage first, which takes longer than a small run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Run flex attention uncompiled. Compilation takes seconds for each shape and does not change the result."""
    monkeypatch.setattr(flex_integration, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *_, _compile, **rest: create_block_mask(*_, **rest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def same_environment():
    """Restore the environment afterwards. transformers writes FSDP settings to it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def warned():
    """Return transformers' warnings during the test."""
    records, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    yield records
    logging.getLogger("transformers").removeHandler(handler)


@pytest.fixture(scope="module")
def chrome():
    from chromium import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def server():
    from killed_outputs import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture
def model():
    return tiny_model(vocab_size=60)


@pytest.fixture
def pairs():
    return small_pairs()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run folders with three checkpoints, of a plain Trainer and of `MetaphraseTrainer`."""
    folders = {}
    for name, trainer_class in (("plain", Seq2SeqTrainer), ("whole", small_runs.MetaphraseTrainer)):
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        small_runs.make_trainer(folders[name], trainer_class).train()
    return folders


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs["whole"], tmp_path / "run")


@pytest.fixture
def plain_run(runs, tmp_path):
    return shutil.copytree(runs["plain"], tmp_path / "plain")


@pytest.fixture
def generator():
    return tiny_generator()


@pytest.fixture
def sources(generator):
    return generator.tokenizers.encode_sources(SOURCES)


@pytest.fixture(scope="module")
def generators():
    """Tiny generators: with one tokenizer for both sides under True, with two under False."""
    return {joint: tiny_generator(joint) for joint in (True, False)}


@pytest.fixture(scope="module")
def model_folders(generators, tmp_path_factory):
    root = tmp_path_factory.mktemp("generators")
    return {joint: save_generator(generator, root / str(joint)) for joint, generator in generators.items()}


@pytest.fixture(scope="module")
def families():
    """A T5 and a BART of transformers, with the vocabulary of the generators."""
    from pipeline_models import family_model

    models = {name: family_model(name) for name in ("t5", "bart")}
    models["bart"].generation_config.max_new_tokens = 9
    return models


@pytest.fixture
def pipe(generators):
    """A text2text pipeline with one tokenizer. The model's generation config sets eight new tokens."""
    return pipeline("text2text-generation", model=generators[True].model, tokenizer=generators[True].tokenizers)


@pytest.fixture(scope="session")
def cli_model(tmp_path_factory):
    return str(save_generator(tiny_generator(kind="byte"), tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(scope="session")
def other_cli_model(tmp_path_factory):
    return str(save_generator(tiny_generator(kind="byte", seed=1), tmp_path_factory.mktemp("cli") / "other"))


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    target.write_text("\n".join(TARGETS) + "\n", encoding="utf-8")
    return str(source), str(target)


@pytest.fixture(scope="session")
def corpus():
    from metaphrase.demo.corpus import make_demo_corpus

    splits = make_demo_corpus(num_train=2000, num_validation=20, num_test=20)
    return {split: pairs[: 60 if split == "train" else 8] for split, pairs in splits.items()}


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory, corpus):
    """A folder with the pairs of `corpus`, not to be changed: a TSV file and a text file per side for each split."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, pairs in corpus.items():
        (folder / f"{split}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs), encoding="utf-8")
        for column, name in enumerate(("en", "de")):
            lines = "".join(pair[column] + "\n" for pair in pairs)
            (folder / f"{split}.{name}").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path, corpus_folder):
    return shutil.copytree(corpus_folder, tmp_path / "data")


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    from converted_models import bart_like, draw

    folder = tmp_path_factory.mktemp("bart") / "bart"
    model = bart_like("bart", draw("bart", 100), tie_word_embeddings=True).eval()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def reference(corpus_folder, tmp_path_factory):
    """The folder of a run of two processes by torchrun on one machine."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    words = shlex.join(words_of(corpus_folder, folder))
    launch(f"torchrun --nproc_per_node 2 --master_port {free_port()} -m metaphrase.scripts.train {words}")
    return folder
