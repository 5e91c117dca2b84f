import pytest
import torch
import transformers
from converted_models import fill_randomly

from metaphrase.conversion import adapt, convert
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.scripts.__main__ import run
from metaphrase.tokenization import TokenizerPair, train_tokenizer

TEXTS = ["the dog sleeps under a tree", "the cat eats a fish."]
VOCAB = 264
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
_GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 20}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
BASES = {
    "llama": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SIZES, max_window_layers=2, use_sliding_window=True, sliding_window=3),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma2": transformers.Gemma2Config(**_GEMMA, sliding_window=4),
    "gemma3_text": transformers.Gemma3TextConfig(**_GEMMA, sliding_window=5),
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, kind="char", show_progress=False)


def save_base(folder, tokenizer, config, seed=0):
    """Save a decoder-only model with random weights, and return it. Without a seed they are those of a new model."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if seed is not None:
        fill_randomly(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def load(folder):
    return MetaphraseForConditionalGeneration.from_pretrained(folder).eval()


def random_ids(*shape, seed=0):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("cross_attention", ["copied", "new"])
def test_decoder_computes_the_logits_of_its_base(name, cross_attention, tokenizer, tmp_path):
    base = save_base(tmp_path / "base", tokenizer, BASES[name])
    adapt(tmp_path / "base", tmp_path / "ours", cross_attention=cross_attention)
    ours, ids = load(tmp_path / "ours"), random_ids(2, 11)
    expected = base(ids).logits
    given = ours(input_ids=random_ids(2, 7, seed=1), decoder_input_ids=ids).logits
    # A copied cross-attention changes the result until its output is zero.
    assert (given - expected).abs().max() > 0.1 or cross_attention == "new"
    for layer in ours.get_decoder().layers:
        for parameter in layer.cross_attn.o_proj.parameters():
            parameter.zero_()
    given = ours(input_ids=random_ids(2, 7, seed=1), decoder_input_ids=ids).logits
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("name", BASES)
def test_encoder_has_the_layers_of_its_base_and_sees_both_sides(name, tokenizer, tmp_path):
    base = save_base(tmp_path / "base", tokenizer, BASES[name])
    adapt(tmp_path / "base", tmp_path / "ours", encoder_layers=[0, 2, 3], decoder_layers=[3])
    ours, weights = load(tmp_path / "ours"), base.state_dict()
    for number, layer in enumerate((0, 2, 3)):
        given = ours.get_encoder().layers[number].mlp.up_proj.weight
        assert torch.equal(given, weights[f"model.layers.{layer}.mlp.up_proj.weight"])
    cross = ours.get_decoder().layers[0].cross_attn.v_proj.weight
    assert torch.equal(cross, weights["model.layers.3.self_attn.v_proj.weight"])
    types = getattr(BASES[name], "layer_types", None) or ["full_attention"] * 4
    assert ours.config.stack_sizes("encoder").layer_types == (types[0], types[2], types[3])
    # The first state depends on the second token.
    ids = random_ids(1, 9)
    states = [ours.get_encoder()(ids).last_hidden_state[0, 0]]
    ids[0, 1] = 3 if ids[0, 1] != 3 else 4
    states.append(ours.get_encoder()(ids).last_hidden_state[0, 0])
    assert not torch.allclose(*states)


@torch.no_grad()
def test_merged_attention_has_no_weights_of_its_own(tokenizer, tmp_path):
    base = save_base(tmp_path / "base", tokenizer, BASES["gemma3_text"])
    adapt(tmp_path / "base", tmp_path / "ours", cross_attention="merged")
    ours = load(tmp_path / "ours")
    layers = sum(parameter.numel() for parameter in base.model.layers.parameters())
    assert sum(parameter.numel() for parameter in ours.get_decoder().layers.parameters()) == layers
    ids, source = random_ids(1, 5), random_ids(1, 6, seed=1)
    given = ours(input_ids=source, decoder_input_ids=ids).logits
    assert (given - base(ids).logits).abs().max() > 0.1
    # It is a T5Gemma 2.
    convert(tmp_path / "ours", tmp_path / "theirs", to="t5gemma2")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    expected = theirs(input_ids=source, decoder_input_ids=ids).logits
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
def test_another_encoder_may_be_smaller(tokenizer, tmp_path):
    sizes = SIZES | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = transformers.LlamaConfig(**sizes | {"max_position_embeddings": 32}, head_dim=8)
    base = save_base(tmp_path / "base", tokenizer, transformers.LlamaConfig(**SIZES))
    encoder = save_base(tmp_path / "encoder", tokenizer, small, seed=1)
    adapt(tmp_path / "base", tmp_path / "ours", encoder=tmp_path / "encoder")
    ours, ids = load(tmp_path / "ours"), random_ids(2, 8)
    assert torch.equal(ours.get_encoder().embed_tokens.weight, encoder.model.embed_tokens.weight)
    given = ours(input_ids=random_ids(2, 7, seed=1), decoder_input_ids=ids).logits
    torch.testing.assert_close(given, base(ids).logits, rtol=0, atol=1e-5 * given.abs().max().item())
    assert ours.config.max_position_embeddings == 32
    # Keys and values of another width are drawn: training can change them as soon as the output is not zero.
    assert all(layer.cross_attn.k_proj.weight.std() > 0 for layer in ours.get_decoder().layers)
    assert TokenizerPair.from_pretrained(tmp_path / "ours").is_joint
    other = train_tokenizer(["a b c"], kind="word", show_progress=False)
    other.save_pretrained(tmp_path / "encoder")
    adapt(tmp_path / "base", tmp_path / "two", encoder=tmp_path / "encoder")
    two = TokenizerPair.from_pretrained(tmp_path / "two")
    assert (two.source.get_vocab(), two.target.get_vocab()) == (other.get_vocab(), tokenizer.get_vocab())
    with pytest.raises(ValueError, match=r"must have the shape \(16, 16\)"):
        adapt(tmp_path / "base", tmp_path / "more", encoder=tmp_path / "encoder", cross_attention="copied")


def test_an_adapted_model_learns(tokenizer, tmp_path, capsys):
    # The end of sequence also pads.
    theirs = train_tokenizer(TEXTS, kind="char", show_progress=False)
    theirs.pad_token = theirs.unk_token = None
    config = transformers.Qwen2Config(**SIZES | {"pad_token_id": None, "bos_token_id": None})
    save_base(tmp_path / "base", theirs, config, None)
    (tmp_path / "base/LICENSE.txt").write_text("Free", encoding="utf-8")
    folders = [str(tmp_path / "base"), str(tmp_path / "ours")]
    assert run("adapt", [*folders, "--encoder_layers", "0-99999999999"]) == 2
    assert "`encoder_layers` must be numbers of layers, such as 0-5,8" in capsys.readouterr().err
    assert run("adapt", [*folders, "--encoder_layers", "0-1", "--dropout", "0"]) == 0
    assert (tmp_path / "ours/LICENSE.txt").read_text(encoding="utf-8") == "Free"
    assert load(folders[1]).config.dropout == 0
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS), encoding="utf-8")
    words = [word for split in ("train", "test") for word in (f"--{split}_file", str(tmp_path / "pairs.tsv"))]
    words += ["--model_name_or_path", folders[1], "--output_dir", str(tmp_path / "run"), "--quiet"]
    words += ["--max_steps", "200", "--learning_rate", "4e-3", "--save_strategy", "no", "--use_cpu", "true"]
    words += ["--metrics", "exact_match"]
    assert run("train", words) == 0
    predictions = (tmp_path / "run/test_predictions.txt").read_text(encoding="utf-8").splitlines()
    assert predictions == [text[::-1] for text in TEXTS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_layers": [0, 4]}, r"`encoder_layers` must be numbers of layers from 0 to 3, got \[4\]\."),
        ({"encoder_layers": range(9999)}, r"`encoder_layers` must be .*, got \[4, 5, 6\]\.$"),
        ({"decoder_layers": []}, r"`decoder_layers` must be numbers of layers .* got \[\]"),
        ({"cross_attention": "copy"}, "`cross_attention` must be one of copied, new, merged, got 'copy'"),
        ({"encoder": "gpt2"}, r"`model_type` must be one of llama, .*, got 'gpt2' for .*gpt2"),
        ({"encoder": "other"}, r"`norm_eps` must be the same in both models, got 1e-06 and 0.1"),
    ],
)
def test_bases_that_do_not_fit_are_refused(options, message, tokenizer, tmp_path):
    save_base(tmp_path / "base", tokenizer, transformers.LlamaConfig(**SIZES))
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    save_base(tmp_path / "gpt2", tokenizer, transformers.GPT2Config(vocab_size=VOCAB, **sizes))
    save_base(tmp_path / "other", tokenizer, transformers.LlamaConfig(**SIZES, rms_norm_eps=0.1))
    if "encoder" in options:
        options = options | {"encoder": tmp_path / options["encoder"]}
    with pytest.raises(ValueError, match=message):
        adapt(tmp_path / "base", tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()
