import operator
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from metaphrase.conversion import FAMILIES, convert
from metaphrase.conversion.families.family import HEAD_BIAS, Counterpart, Family
from metaphrase.modeling import IGNORED_LABEL, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import STACKS

TOLERANCE = 1e-5
VARIANTS = range(3)
SOURCE, TARGET = 9, 7


def draw(family: str, variant: int) -> random.Random:
    return random.Random(f"{family} {variant}")


def fill_randomly(model: PreTrainedModel, seed: int, spared: str | None = None) -> None:
    """Draw weights so large that attention is far from uniform, norms are away from 1 and biases from 0, in place.

    Weights with `spared` in their name stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (spared is None or spared not in name):
                mean = parameter.mean().item() if parameter.ndim == 1 else 0.0
                parameter.normal_(mean, 0.25, generator=generator)


def random_inputs(theirs: PreTrainedModel, rng: random.Random, has_padding: bool) -> dict[str, torch.Tensor]:
    """Sources and labels of two or three rows; special ids stand only where tokenizers put them."""
    config = theirs.config
    special = {config.pad_token_id, config.eos_token_id, getattr(config, "bos_token_id", None)}
    source_size, target_size = (
        len(module.weight) for module in (theirs.get_input_embeddings(), theirs.get_output_embeddings())
    )

    def rows(count: int, length: int, size: int, filler: int) -> torch.Tensor:
        allowed = [index for index in range(size) if index not in special]
        made = torch.full((count, length), filler)
        for row in range(count):
            end = rng.randint(2, length) if has_padding and row else length
            made[row, :end] = torch.tensor(rng.choices(allowed, k=end))
            made[row, end - 1] = config.eos_token_id
        return made

    count = rng.choice((2, 3))
    input_ids = rows(count, SOURCE, source_size, config.pad_token_id)
    labels = rows(count, TARGET, target_size, IGNORED_LABEL)
    return {"input_ids": input_ids, "attention_mask": (input_ids != config.pad_token_id).long(), "labels": labels}


def assert_close(given: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Within 1e-5 of the largest of the expected values, or of 1 if they are smaller."""
    assert given.shape == expected.shape, what
    difference = (given - expected).abs().max().item()
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    assert difference <= bound, f"{what}: {difference} is more than {bound}"


def assert_equal_training(ours: PreTrainedModel, theirs: PreTrainedModel, family: Family, inputs: dict) -> None:
    """Logits, every hidden state, loss, and the gradient of every weight."""
    labels = inputs["labels"]
    # Some of their functions change what they are given.
    if hasattr(theirs, "prepare_decoder_input_ids_from_labels"):
        shifted = theirs.prepare_decoder_input_ids_from_labels(labels.clone())
    else:
        shift = sys.modules[type(theirs).__module__].shift_tokens_right
        shifted = shift(labels.clone(), theirs.config.pad_token_id, theirs.config.decoder_start_token_id)
    assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), shifted)
    for model in (ours, theirs):
        model.zero_grad()
    arguments = inputs | {"decoder_input_ids": shifted, "output_hidden_states": True}
    given, expected = ours(**arguments), theirs(**arguments)
    masks = {"encoder": inputs["attention_mask"].bool(), "decoder": labels != IGNORED_LABEL}
    for stack, mask in masks.items():
        pairs = [getattr(output, f"{stack}_hidden_states") for output in (given, expected)]
        for index, (our_states, their_states) in enumerate(zip(*pairs, strict=True)):
            assert_close(our_states[mask], their_states[mask], f"{stack} hidden state {index}")
    assert expected.logits.std() > 0.1
    assert_close(given.logits[masks["decoder"]], expected.logits[masks["decoder"]], "logits")
    assert_close(given.loss, expected.loss, "loss")
    given.loss.backward()
    expected.loss.backward()
    stored = {name.replace(*family.file_name): name for name in theirs.state_dict()}
    for name, parameter in ours.named_parameters():
        if name in family.embedding_names:
            counterpart = next(Counterpart(other) for other in family.embedding_names[name] if other in stored)
        elif name == HEAD_BIAS:
            # The bias of the logits does not learn in most classes.
            continue
        else:
            counterpart = family.counterpart(name, ours.config)
        gradient = counterpart.to_ours(theirs.get_parameter(stored[counterpart.name]).grad)
        assert_close(parameter.grad, gradient, f"gradient of {name}")


@torch.no_grad()
def assert_equal_generation(ours: PreTrainedModel, theirs: PreTrainedModel, inputs: dict) -> None:
    """Greedy and beam search, with and without a cache, token for token."""
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    # Classes that tell padding from its id would take a token that they generate for it.
    config = theirs.config
    inputs["suppress_tokens"] = [config.pad_token_id]
    # T5's classes count the layers of a cache by the encoder's: a deeper decoder finds no place in it.
    has_cache = getattr(config, "num_decoder_layers", 0) <= getattr(config, "num_hidden_layers", 0)
    for num_beams in (1, 3):
        for use_cache in (True, False):
            options = {"num_beams": num_beams, "use_cache": use_cache, "do_sample": False, "max_new_tokens": 6}
            given = ours.generate(**inputs, **options)
            # Without a cache, FSMT decodes without a causal mask.
            options["use_cache"] = config.model_type == "fsmt" or (use_cache and has_cache)
            assert given.tolist() == theirs.generate(**inputs, **options).tolist(), options


def assert_same_weights(theirs: PreTrainedModel, folder: Path) -> None:
    """Converted out again, the folder holds their very state dict."""
    convert(folder / "ours", folder / "again", to=theirs.config.model_type)
    again = type(theirs).from_pretrained(folder / "again")
    assert type(again.config) is type(theirs.config)
    state = again.state_dict()
    assert set(state) == set(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(state[name], value), name
    written, expected = (load_file(folder / name / "model.safetensors") for name in ("again", "theirs"))
    assert written.keys() == expected.keys()
    assert all(written[name].dtype == expected[name].dtype for name in expected)


def check_conversion(theirs: PreTrainedModel, name: str, rng: random.Random, folder: Path) -> None:
    theirs.eval()
    theirs.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    ours = MetaphraseForConditionalGeneration.from_pretrained(folder / "ours").eval()
    family = FAMILIES[name].of_model(theirs.config.to_dict())
    for field, name in family.field_names.items():
        assert getattr(ours.config, field) == operator.attrgetter(name)(theirs.config)
    kernel = rng.choice(("eager", "sdpa"))
    if ours.config.attn_logit_softcapping is None:
        ours.set_attn_implementation(kernel)
    for has_padding in (False, True):
        inputs = random_inputs(theirs, rng, has_padding)
        assert_equal_training(ours, theirs, family, inputs)
        assert_equal_generation(ours, theirs, inputs)
    assert_same_weights(theirs, folder)


def bart_like(family: str, rng: random.Random, **fields) -> PreTrainedModel:
    """A model of a family that is made like BART, of random dimensions and options."""
    hidden = rng.choice((20, 24, 27, 30, 33, 35, 36))
    divisors = [count for count in range(1, 7) if hidden % count == 0]
    fields = {
        "vocab_size": rng.randint(29, 61),
        "d_model": hidden,
        **{f"{stack}_layers": rng.randint(1, 3) for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": rng.choice(divisors) for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": rng.randint(17, 50) for stack in ("encoder", "decoder")},
        "max_position_embeddings": rng.randint(16, 40),
        "activation_function": rng.choice(("relu", "gelu", "silu", "gelu_new", "swish")),
        "scale_embedding": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "dropout": 0.1,
        "attention_dropout": rng.choice((0.0, 0.1)),
    } | fields
    config = AutoConfig.for_model(family, **fields)
    theirs = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    # FSMT's sinusoids are parameters, which its own training changes.
    has_sinusoids = FAMILIES[family].fixed.get("position_embedding_type") != "learned" and rng.random() < 0.7
    fill_randomly(theirs, rng.randrange(2**31), "embed_positions" if has_sinusoids else None)
    if hasattr(theirs, "final_logits_bias") and rng.random() < 0.5:
        theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    base = theirs.base_model
    if not config.tie_word_embeddings and hasattr(base, "shared"):
        # Nothing reads it where it is not tied: checkpoints keep a copy there.
        with torch.no_grad():
            base.shared.weight.copy_(base.encoder.embed_tokens.weight)
    return theirs


def encoder_decoder_like(kind, rng, **changes):
    """Return a model of two stacks of one kind, with a head that is tied or not. Changes of a stack go by its name."""
    heads, padding = rng.choice((2, 4)), rng.choice((0, 1, 3))
    shared = {"hidden_size": heads * rng.randint(5, 9), "pad_token_id": padding, "eos_token_id": 2, "bos_token_id": 5}
    shared |= {"hidden_act": "gelu" if kind == "roberta" else rng.choice(("gelu", "relu")), "layer_norm_eps": 1e-5}
    shared |= {} if kind == "bert-generation" else {"type_vocab_size": rng.randint(1, 3)}
    is_tied = rng.random() < 0.5

    def stack(name):
        sizes = {"vocab_size": rng.randint(29, 61), "num_hidden_layers": rng.randint(1, 3), "intermediate_size": 23}
        sizes |= {"num_attention_heads": rng.choice((1, heads)), "max_position_embeddings": rng.randint(24, 40)}
        fields = shared | sizes | {"tie_word_embeddings": is_tied, "model_type": kind} | changes.get(name, {})
        return fields | dict.fromkeys(("is_decoder", "add_cross_attention"), name == "decoder")

    fields = {name: stack(name) for name in STACKS} | changes.get("whole", {})
    ids = {name: shared[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    fields = ids | {"decoder_start_token_id": 5, "tie_word_embeddings": is_tied} | fields
    config = AutoConfig.for_model("encoder-decoder", **fields)
    theirs = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    fill_randomly(theirs, rng.randrange(2**31))
    for name, parameter in theirs.named_parameters():
        if name.startswith("encoder.pooler."):
            parameter.requires_grad_(False).zero_()
    if not config.decoder.tie_word_embeddings:
        # Nothing reads this bias where it is not tied.
        head = theirs.decoder.cls.predictions if kind == "bert" else theirs.decoder.lm_head
        head.bias.requires_grad_(False).copy_(head.decoder.bias.detach())
    return theirs
