"""Tests of heads that classify, and of the encoder alone: both ways equal transformers' classes, for random variants."""

import json

import pytest
import torch
import transformers
from converted_models import assert_close, draw, fill_randomly
from safetensors.torch import load_file

from metaphrase.conversion import convert

T5_FAMILIES, BART_FAMILIES = ("t5", "mt5", "umt5"), ("bart", "mbart", "plbart")
CLASSES = {
    "texts": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "answers": transformers.AutoModelForQuestionAnswering,
    "encoder": transformers.AutoModelForTextEncoding,
}
CASES = [(family, kind) for family in T5_FAMILIES for kind in CLASSES]
CASES += [(family, "texts") for family in (*BART_FAMILIES, "t5gemma")]
CASES += [("bart", "answers"), ("mbart", "answers"), ("t5gemma", "tokens"), ("t5gemma", "encoder")]
LENGTH = 9


def their_config(family, kind, rng):
    labels = 2 if kind == "answers" else rng.choice((2, 5)) if kind == "tokens" else rng.choice((1, 2, 5))
    fields = {"vocab_size": 40, "num_labels": labels, "classifier_dropout": 0.1}
    if family in T5_FAMILIES:
        sizes = {"d_model": rng.randint(17, 30), "d_kv": rng.randint(3, 9), "d_ff": 23, "num_heads": rng.randint(1, 3)}
        sizes |= {"num_layers": rng.randint(1, 3), "num_decoder_layers": rng.randint(1, 3), "decoder_start_token_id": 0}
        fields |= sizes | {"feed_forward_proj": rng.choice(("relu", "gated-gelu"))}
    elif family in BART_FAMILIES:
        fields |= {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        fields |= {"d_model": 24, "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 20}
    else:
        stack = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2, "head_dim": 8}
        stack |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "query_pre_attn_scalar": 8}
        stack |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
        fields = {"encoder": stack, "decoder": dict(stack), "num_labels": labels, "classifier_dropout_rate": 0.1}
        fields |= {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
        fields["is_encoder_decoder"] = kind == "texts"
    return transformers.AutoConfig.for_model(family, **fields)


def labels_for(kind, config, rng):
    count = config.num_labels
    if kind == "texts":
        return {"labels": torch.rand(3) if count == 1 else torch.tensor(rng.choices(range(count), k=3))}
    if kind == "tokens":
        return {"labels": torch.tensor([rng.choices(range(count), k=LENGTH) for _ in range(3)])}
    places = {name: torch.tensor(rng.choices(range(LENGTH), k=3)) for name in ("start_positions", "end_positions")}
    return places if kind == "answers" else {}


@pytest.mark.parametrize(("family", "kind"), CASES, ids=str)
def test_heads_equal_those_of_transformers(family, kind, tmp_path):
    rng = draw(family, kind)
    auto, config = CLASSES[kind], their_config(family, kind, rng)
    theirs = auto.from_config(config, attn_implementation="eager").eval()
    fill_randomly(theirs, 5)
    for name, parameter in theirs.named_parameters():
        # Scores of T5 are not divided by the root of the heads' width.
        parameter.data.mul_(0.3 if name.endswith(".q.weight") else 1.0)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = auto.from_pretrained(tmp_path / "ours").eval()
    assert type(ours).__name__.startswith("Metaphrase") and (
        kind == "answers" or ours.config.id2label == theirs.config.id2label
    )
    # Texts of several lengths that end with an end of sequence.
    ids = torch.full((3, LENGTH), config.pad_token_id)
    for row, length in enumerate((LENGTH, rng.randint(2, LENGTH), rng.randint(2, LENGTH))):
        ids[row, : length - 1] = torch.tensor(rng.choices(range(6, 40), k=length - 1))
        ids[row, length - 1] = config.eos_token_id
    inputs = {"input_ids": ids, "attention_mask": (ids != config.pad_token_id).long()}
    labels = labels_for(kind, config, rng)
    if kind == "tokens":
        labels["labels"].masked_fill_(ids == config.pad_token_id, -100)
    outputs = [model(**inputs, **labels) for model in (ours, theirs)]
    names = {"answers": ("start_logits", "end_logits"), "encoder": ("last_hidden_state",)}.get(kind, ("logits",))
    is_text = inputs["attention_mask"].bool()
    for name in names:
        given, expected = (output[name] if kind == "texts" else output[name][is_text] for output in outputs)
        assert_close(given, expected, name)
    losses = [out.last_hidden_state[is_text].square().mean() if kind == "encoder" else out.loss for out in outputs]
    assert_close(*losses, "loss")
    for loss in losses:
        loss.backward()
    gradients = [
        sorted(parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None)
        for model in (ours, theirs)
    ]
    assert_close(*(torch.tensor([norm for norm in norms if norm > 1e-6]) for norms in gradients), "norms of gradients")
    # The way back is the same file.
    convert(tmp_path / "ours", tmp_path / "again", to=family)
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "theirs"))
    assert written.keys() == expected.keys() and all(written[name].equal(expected[name]) for name in expected)
    again = json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))
    assert again["architectures"] == [type(theirs).__name__]
    repeated = auto.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()(**inputs)
    assert_close(repeated[names[0]], outputs[1][names[0]], "the way back")
