import itertools
import math

import numpy as np
import pytest
import torch
from small_experiments import ONE_STEP, assert_resumed_equal, read_log, train
from small_trainers import small_pairs
from tiny_generator import tiny_pair
from tiny_models import DESIGNS, MERGED, tiny_model
from weighted_targets import assert_accumulated_equal, gradient, log_probs_alone, weighted_loss

from metaphrase.analysis.judges import Judge
from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.decoding.fast_generation import sample_by_prefix
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.techniques import rewards
from metaphrase.techniques.preferences import target_log_probs
from metaphrase.techniques.rewards import WEIGHTS, RewardTraining, pack, unpack
from metaphrase.training.recipe.recipe import Recipe

END, LENGTH = 2, 3
TOY = {"vocab_size": 5, "hidden_size": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
TOY |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "initializer_range": 0.6}
SOURCE = [3, 4, 3, END]


def all_targets():
    """All targets of at most three tokens, which end or have three."""
    tokens = [*range(5)]
    for length in range(1, LENGTH + 1):
        for ids in itertools.product(tokens, repeat=length):
            if END not in ids[:-1] and (ids[-1] == END or length == LENGTH):
                yield ids


TARGETS = [*all_targets()]
# Some number for each target, which any score may be.
REWARDS = np.array([math.sin(7 * sum((place + 2) * token for place, token in enumerate(ids))) for ids in TARGETS])


def toy():
    return tiny_model(**TOY).double()


def test_risk_is_the_exact_one():
    model = toy()
    log_probs = log_probs_alone(model, SOURCE, TARGETS)
    assert log_probs.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    exact = -(log_probs.exp() * torch.tensor(REWARDS)).sum()
    packed = target_log_probs(model, pack([SOURCE], [dict.fromkeys(TARGETS, 1.0)])).double()
    assert packed.tolist() == pytest.approx(log_probs.tolist(), rel=1e-6)
    row = WEIGHTS["risk"](REWARDS, packed.numpy())
    batch = pack([SOURCE], [dict(zip(TARGETS, row, strict=True))])
    assert gradient(model, weighted_loss(model, batch)).tolist() == pytest.approx(
        gradient(model, exact).tolist(), abs=1e-6
    )
    # The renormalized probabilities of a part, by autograd.
    part = [*range(0, len(TARGETS), 5)]
    some, values = log_probs_alone(model, SOURCE, [TARGETS[index] for index in part]), torch.tensor(REWARDS[part])
    row = WEIGHTS["risk"](REWARDS[part], some.detach().numpy())
    batch = pack([SOURCE], [{TARGETS[index]: weight for index, weight in zip(part, row, strict=True)}])
    assert gradient(model, weighted_loss(model, batch)).tolist() == pytest.approx(
        gradient(model, -(some.softmax(0) * values).sum()).tolist(), abs=1e-6
    )


def test_leave_one_out_is_unbiased():
    """20,000 draws in groups of 4: each part of the gradient is within 5 standard errors of the exact one."""
    model, draws, size = toy(), 20_000, 4
    log_probs = log_probs_alone(model, SOURCE, TARGETS)
    exact = gradient(model, -(log_probs.exp() * torch.tensor(REWARDS)).sum())
    gradients = torch.stack([gradient(model, log_probs_alone(model, SOURCE, [ids])[0]) for ids in TARGETS])
    torch.manual_seed(0)
    options = {"max_length": LENGTH + 1, "num_return_sequences": draws // 2, "search": sample_by_prefix}
    rows = decode(model.float(), [SOURCE] * 2, return_scores=True, **options, **rewards._SAMPLING)
    numbers = {ids: index for index, ids in enumerate(TARGETS)}
    drawn = torch.tensor([numbers[tuple(candidate.ids)] for row in rows for candidate in row])
    scores = {tuple(candidate.ids): candidate.score for row in rows for candidate in row}
    assert [*scores.values()] == pytest.approx([log_probs[numbers[ids]].item() for ids in scores], abs=1e-5)
    # Samples follow the model.
    expected = draws * log_probs.detach().exp()
    deviations = (torch.bincount(drawn, minlength=len(TARGETS)) - expected) / (expected + 1).sqrt()
    assert deviations.abs().max() < 5
    groups = drawn[torch.randperm(draws)].view(-1, size)
    factors = torch.tensor(np.array([WEIGHTS["rloo"](REWARDS[group]) for group in groups.numpy()]))
    estimates = -(factors[:, :, None] * gradients[groups]).sum(dim=1)
    errors = estimates.std(dim=0) / len(groups) ** 0.5
    assert ((estimates.mean(dim=0) - exact).abs() <= 5 * errors + 1e-9).all()
    # The estimate says something: the gradient is far from 0.
    assert (exact.abs() > 20 * errors).any()


def test_standardized_rewards():
    values = np.array([1.0, 2.0, 4.0])
    assert WEIGHTS["rloo"](values).tolist() == pytest.approx([(1 - 3) / 3, (2 - 2.5) / 3, (4 - 1.5) / 3])
    spread = np.std(values, ddof=1)
    assert WEIGHTS["grpo"](values).tolist() == pytest.approx([(value - 7 / 3) / spread / 3 for value in values])


@pytest.mark.parametrize("design", ["rotary", "relative", "soft_caps", "merged"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_several_targets_of_a_source_are_pairs(design, multiple):
    model = tiny_model(**(MERGED if design == "merged" else DESIGNS[design])).double()
    sources = [[5, 9, 7, 4, 2], [6, 3, 2], [8, 2]]
    targets = [{(4, 5, 2): 0.5, (9, 2): -1.5}, {(7, 7, 7, 7, 2): 2.0}, {(3, 2): 1.0, (5, 6, 2): 0.25, (2,): -1.0}]
    batch = pack(sources, targets, multiple, model.config.merged_attention)
    assert batch["input_ids"].shape[1] % multiple == 0 == batch["labels"].shape[1] % multiple
    values = [log_probs_alone(model, source, of) for source, of in zip(sources, targets, strict=True)]
    expected = -sum((part * torch.tensor([*of.values()])).sum() for part, of in zip(values, targets, strict=True))
    loss = weighted_loss(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    first, second = gradient(model, loss), gradient(model, expected)
    assert (first - second).abs().max() <= 1e-5 * second.abs().max()


@pytest.mark.parametrize("candidates", ["sample", "beam"])
def test_candidates_come_with_their_log_probabilities(candidates, monkeypatch):
    model, sources = tiny_model(), [[5, 9, 7, 4, 2], [6, 3, 2]]
    model.generation_config.max_length = 6
    reward = make_reward(monkeypatch, None, reward_loss="risk", candidates=candidates)
    rows, log_probs = reward._candidates(model, sources)
    assert all(len({*row}) == len(row) > 1 for row in rows)
    expected = target_log_probs(model, pack(sources, [dict.fromkeys(row, 1.0) for row in rows]))
    assert np.concatenate(log_probs).tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_weights_of_equal_candidates_add_up_beside_the_reference(monkeypatch):
    first, second, reference = (5, 2), (7, 2), (9, 2)
    reward = make_reward(monkeypatch, None, cross_entropy_share=0.25)
    monkeypatch.setattr(reward, "_candidates", lambda *_: ([[first, first, second], [second] * 3], [None] * 2))
    monkeypatch.setattr(reward, "_rewards", lambda *_: [np.array([1.0, 1.0, 0.0]), np.ones(3)])
    pairs = [{"input_ids": source, "labels": [*reference]} for source in ([4, 6, 2], [8, 2])]
    batch = reward(tiny_model(), PairCollator(0)(pairs))
    # By hand: the mean of the other rewards is 1/2, 1/2 and 1. Equal rewards of a source leave its reference alone.
    assert batch["weight"].tolist() == pytest.approx([0.75 * 2 * (1 - 0.5) / 3, 0.75 * (0 - 1) / 3, 0.25, 0.25])
    assert batch["labels"][0].tolist() == [*first, *second, *reference, *reference]


def test_batch_is_read_back(monkeypatch):
    pairs = small_pairs(5)
    rows = [(pair["input_ids"], tuple(pair["labels"])) for pair in pairs]
    for batch in (PairCollator(0)(pairs), PackedCollator(0, 8)(pairs)):
        assert sorted(unpack(batch)) == sorted(rows)
        lengths = [len(source) for source, _ in unpack(batch)]
        assert lengths == sorted(lengths, reverse=True)
    # A batch without labels stays as it is.
    batch["labels"][:] = IGNORED_LABEL
    assert make_reward(monkeypatch, None)(tiny_model(), batch).keys() == batch.keys()


def test_bleu_has_the_tokenizer_of_the_run():
    texts = [], ["我们明天去北京"], ["我们明天去上海"]
    assert rewards.load_reward("bleu", "char").score(*texts)[0] > 2 * rewards.load_reward("bleu").score(*texts)[0]


def make_reward(monkeypatch, score, **fields):
    monkeypatch.setattr(rewards, "load_reward", lambda name, _: Judge(name, score, False))
    recipe = Recipe.from_mapping(
        {"train_file": "train.tsv", "model_name_or_path": "base", "reward": "any:score", "num_candidates": 4, **fields},
        "a test",
    )
    return RewardTraining(recipe, tiny_pair())


def test_accumulated_batches_are_one(tmp_path, monkeypatch):
    def sample(_, sources):
        return [[tuple(ids[:-1]), tuple(ids[::-1]), (*ids[:2], 2)] for ids in sources], [None] * len(sources)

    def make():
        reward = make_reward(monkeypatch, lambda _, targets, __: [len(target) for target in targets])
        monkeypatch.setattr(reward, "_candidates", sample)
        return reward

    assert_accumulated_equal(make, small_pairs(8, vocab_size=20), tmp_path, max_steps=1, learning_rate=1e-3)


SCORES = """
def num_vowels(sources, targets, references):
    assert len(sources) == len(targets) == len(references) and all(sources) and all(references)
    return [sum(letter in "aeiou" for letter in target) for target in targets]

def nothing(sources, targets, references):
    return [0.0] * len(targets)

def not_a_number(sources, targets, references):
    return [*nothing(sources, targets, references)[1:], float("nan")]

def too_few(sources, targets, references):
    return [0.0]
"""


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """A module of scores in the working directory."""
    (tmp_path / "scores_of_test.py").write_text(SCORES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "scores_of_test"


@pytest.fixture(scope="module")
def base(corpus_folder, tmp_path_factory):
    """A run of one optimizer step."""
    train(corpus_folder, folder := tmp_path_factory.mktemp("rewards") / "base", **ONE_STEP)
    return {"model_name_or_path": str(folder)}


FIELDS = {"learning_rate": 0.01, "num_candidates": 4, "cross_entropy_share": 0.1, "label_smoothing_factor": 0.0}
FIELDS |= {"max_steps": 12, "save_steps": 6, "logging_steps": 1, "eval_strategy": "no", "test_file": None, "seed": 2}


PARTLY = {"lora_rank": 8, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "learning_rate": 0.03}


@pytest.mark.parametrize(("loss", "more"), [("risk", {}), ("rloo", {}), ("grpo", {}), ("rloo", PARTLY)], ids=str)
def test_reward_rises_and_a_resumed_run_is_equal(loss, more, scores, data, base, tmp_path):
    fields = {**FIELDS, **more, **base, "reward": f"{scores}:num_vowels", "reward_loss": loss, "logging_steps": 4}
    train(data, tmp_path / "run", **fields)
    logged = [entry["reward"] for entry in read_log(tmp_path / "run", "reward")]
    assert len(logged) == 3 and logged[2] > logged[0] + 0.2
    cut = assert_resumed_equal(data, tmp_path / "run", **fields)
    assert [entry["reward"] for entry in read_log(cut, "reward")] == logged


@pytest.mark.parametrize(("score", "rule"), [("not_a_number", "finite scores, got nan"), ("too_few", "scores, got 1")])
def test_a_wrong_score_ends_the_run(score, rule, scores, data, base, tmp_path):
    with pytest.raises(ValueError, match=f"Judge {score} must return .*{rule}"):
        train(data, tmp_path / "run", **FIELDS, **base, reward=f"{scores}:{score}")


def test_equal_rewards_are_said_once(scores, data, base, tmp_path, caplog):
    train(data, tmp_path / "run", **FIELDS, **base, reward=f"{scores}:nothing")
    message = f"The candidates of each source of a batch have equal rewards by {scores}:nothing."
    assert [record.message for record in caplog.records].count(message) == 1
