"""Base models: one to fine-tune gets the vocabulary and the special ids of the tokenizers that are given with it."""

import copy

import pytest
import torch
from other_families import other_model
from small_experiments import train
from tiny_generator import SOURCES, TARGETS, tiny_generator, tiny_pair
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, M2M100Config, M2M100ForConditionalGeneration, PreTrainedTokenizerFast

from metaphrase.evaluation.evaluate import corpus_loss
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.model_setup import fit_special_ids, fit_vocabulary, load_base
from metaphrase.training.recipe.recipe import Recipe

NAMES = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


def word_tokenizer(specials, words=(), begins=False):
    """A tokenizer with these special tokens first; its texts may begin with one."""
    vocabulary = {word: index for index, word in enumerate([*specials, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    framing = [(token, vocabulary[token]) for token in ("<s>", "</s>") if token in vocabulary]
    single = "<s> $A </s>" if begins else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=framing)
    bos = {"bos_token": "<s>"} if "<s>" in vocabulary else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="<pad>", **bos
    )


def pair_of(*specials, begins=False):
    tokenizer = word_tokenizer(specials, begins=begins)
    return TokenizerPair(tokenizer, tokenizer)


def ids_of(model):
    return [[getattr(owner, name) for name in NAMES] for owner in (model.config, model.generation_config)]


def test_a_base_gets_the_ids_of_another_tokenizer_and_its_decoding_ends(data, tmp_path):
    words = sorted(set((data / "train.en").read_text("utf-8").split() + (data / "train.de").read_text("utf-8").split()))
    for name, specials in (("a", ["<pad>", "</s>", "<unk>", "<x>"]), ("b", ["<x>", "<pad>", "<unk>", "</s>"])):
        word_tokenizer(specials, words).save_pretrained(tmp_path / name)
    fields = {"eval_strategy": "no", "save_strategy": "no", "vocab_size": None, "test_file": None}
    fields |= {"learning_rate": 1e-2, "max_steps": 1, "generation_max_length": 20}
    fields["tokenizer_name_or_path"] = tmp_path / "a"
    train(data, tmp_path / "base", **fields)
    fields |= {"tokenizer_name_or_path": tmp_path / "b", "model_name_or_path": tmp_path / "base"}
    fields |= {"max_steps": 150, "logging_steps": 50}
    result = train(data, tmp_path / "run", **fields)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert ids_of(model) == [[1, 3, 1]] * 2
    assert result["num_unfinished"] < 8


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "metaphrase"])
def test_each_special_token_keeps_its_part(family):
    model = tiny_generator().model if family == "metaphrase" else other_model(family)
    config = model.config
    before = {"pad": config.pad_token_id, "eos": config.eos_token_id, "bos": config.bos_token_id}
    # BART sets these ids.
    for owner in (config, model.generation_config):
        owner.decoder_start_token_id, owner.forced_eos_token_id = before["eos"], before["eos"]
    if family == "bart":
        model.generation_config.forced_bos_token_id = before["bos"]
    pair = pair_of("<x>", "<y>", "<unk>", "<z>", "<pad>", "<s>", "</s>")
    model.generation_config.bad_words_ids, model.generation_config.suppress_tokens = [[7]], [8]
    fit_special_ids(model, pair, {})
    assert ids_of(model) == [[4, 6, 6]] * 2
    # Lists of ids of the old vocabulary.
    assert model.generation_config.bad_words_ids is None and model.generation_config.suppress_tokens is None
    assert model.generation_config.forced_eos_token_id == 6
    # Targets do not begin with it.
    assert model.generation_config.forced_bos_token_id is None
    # The token that has the old id of the padding learns.
    rows = {module.padding_idx for module in model.modules() if getattr(module, "padding_idx", None) is not None}
    assert rows <= {4} and rows == ({4} if family in ("bart", "marian") else rows)


@pytest.mark.parametrize(("begins", "languages"), [(True, {}), (False, {"forced_bos_token_id": 5})])
def test_a_forced_beginning_stays_where_targets_begin_so_or_it_is_a_language(begins, languages):
    model = other_model("bart")
    model.generation_config.forced_bos_token_id = 5 if languages else model.config.bos_token_id
    fit_special_ids(model, pair_of("<x>", "<y>", "<unk>", "<z>", "<pad>", "<s>", "</s>", begins=begins), languages)
    assert model.generation_config.forced_bos_token_id == 5 and ids_of(model)[1][:2] == [4, 6]


@pytest.mark.parametrize("rank", [None, 2])
def test_weights_in_half_precision_stay_so_beside_adapters_alone(rank, tmp_path):
    other_model("t5").half().save_pretrained(tmp_path)
    recipe = Recipe(train_file="a", model_name_or_path=str(tmp_path), lora_rank=rank)
    for with_weights in (True, False):
        model = load_base(recipe, with_weights)
        assert model.get_decoder().block[0].layer[0].SelfAttention.q.weight.dtype == (
            torch.float16 if rank else torch.float32
        )


def test_the_own_tokenizer_changes_nothing():
    model = other_model("bart")
    for owner in (model.config, model.generation_config):
        owner.decoder_start_token_id = model.config.eos_token_id
    model.generation_config.bad_words_ids = [[7]]
    before = ids_of(model)
    fit_special_ids(model, tiny_pair(), {})
    assert ids_of(model) == before and model.generation_config.bad_words_ids == [[7]]
    # A tokenizer may have a beginning of sequence that its model knows nothing of.
    model = other_model("t5")
    config = model.config
    config.bos_token_id = model.generation_config.bos_token_id = None
    specials = [f"<{number}>" for number in range(4)]
    specials[config.pad_token_id], specials[config.eos_token_id] = "<pad>", "</s>"
    model.generation_config.bad_words_ids = [[7]]
    before = ids_of(model)
    fit_special_ids(model, pair_of(*specials, "<s>", "<unk>"), {})
    assert ids_of(model) == before and model.generation_config.bad_words_ids == [[7]] and config.bos_token_id is None


def test_ids_that_no_tokenizer_knows_are_refused():
    model, pair = other_model("bart"), pair_of("<pad>", "</s>", "<unk>")
    model.config.decoder_start_token_id = 11
    with pytest.raises(ValueError, match=r"`decoder_start_token_id` of the model must be one of .*, got 11"):
        fit_special_ids(model, pair, {})
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": 20}
    model = M2M100ForConditionalGeneration(M2M100Config(**sizes))
    with pytest.raises(ValueError, match=r"`pad_token_id` of the tokenizer must be 1, .* counts its positions, got 0"):
        fit_special_ids(model, pair, {})


def test_a_target_tokenizer_that_is_larger_lets_its_side_grow():
    """Of two vocabularies each has a size of its own; of one, both sides must find room."""
    pair, recipe = tiny_pair(joint=False), Recipe(train_file="a")
    sizes = (len(pair.source), len(pair.target))
    for fields in ({"share_embeddings": False}, {"share_embeddings": True}):
        model = tiny_generator(joint=fields["share_embeddings"]).model
        small = {"vocab_size": 12, "decoder_vocab_size": 12}
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **fields, **small}))
        fit_vocabulary(model, recipe, pair)
        source = model.get_input_embeddings().num_embeddings
        assert (source, model.lm_head.out_features) == ((max(sizes),) * 2 if fields["share_embeddings"] else sizes)
    for family in ("t5", "marian"):
        model = other_model(family)
        model.resize_token_embeddings(12)
        fit_vocabulary(model, recipe, pair)
        assert model.get_output_embeddings().weight.shape[0] == max(sizes)
        encode = (pair.encode_sources(SOURCES), pair.encode_targets(TARGETS))
        assert corpus_loss(model, *encode)["loss"] > 0


def test_larger_targets_are_refused_beside_an_adapter():
    model = tiny_generator(joint=False).model
    rows = model.lm_head.out_features
    pair = copy.deepcopy(tiny_pair(joint=False))
    pair.target.add_tokens([f"<{number}>" for number in range(9)])
    recipe = Recipe(train_file="a", model_name_or_path="x", lora_rank=2)
    with pytest.raises(ValueError, match=f"`lora_rank` must come with .*, got {rows + 9} .* and {rows} rows"):
        fit_vocabulary(model, recipe, pair)
