"""Base models: one to fine-tune grows to the vocabulary of its tokenizers, which have its special ids."""

import copy

import pytest
import torch
from other_families import other_model
from tiny_generator import SOURCES, TARGETS, tiny_generator, tiny_pair
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from metaphrase.evaluation.evaluate import corpus_loss
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.model_setup import check_special_ids, fit_vocabulary, load_base
from metaphrase.training.recipe.recipe import Recipe


def pair_of(*specials):
    """Tokenizers with these special tokens first."""
    vocabulary = {word: index for index, word in enumerate(specials)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    bos = {"bos_token": "<s>"} if "<s>" in vocabulary else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="<pad>", **bos
    )
    return TokenizerPair(tokenizer, tokenizer)


@pytest.mark.parametrize("rank", [None, 2])
def test_weights_in_half_precision_stay_so_beside_adapters_alone(rank, tmp_path):
    other_model("t5").half().save_pretrained(tmp_path)
    recipe = Recipe(train_file="a", model_name_or_path=str(tmp_path), lora_rank=rank)
    for with_weights in (True, False):
        model = load_base(recipe, with_weights)
        assert model.get_decoder().block[0].layer[0].SelfAttention.q.weight.dtype == (
            torch.float16 if rank else torch.float32
        )


@pytest.mark.parametrize("specials", [["<x>", "<pad>", "</s>"], ["<pad>", "</s>"]], ids=" ".join)
def test_special_ids_of_a_tokenizer_must_be_those_of_the_base(specials):
    model = other_model("t5")
    check_special_ids(model, tiny_pair())
    # Its model knows of no beginning.
    model.config.bos_token_id = None
    names = {model.config.pad_token_id: "<pad>", model.config.eos_token_id: "</s>"}
    check_special_ids(model, pair_of(*(names.get(row, f"<{row}>") for row in range(4)), "<s>", "<unk>"))
    with pytest.raises(ValueError, match=r"`tokenizer_name_or_path` must have the `.*_token_id` . of the model, got ."):
        check_special_ids(model, pair_of(*specials, "<unk>"))


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
