import pytest
import torch

TIES = {
    f"{'tied' if tied else 'untied'}-{'shared' if shared else 'separate'}": {
        "tie_word_embeddings": tied,
        "share_embeddings": shared,
        "decoder_vocab_size": None if shared else 31,
        "logits_bias": True,
    }
    for tied in (True, False)
    for shared in (True, False)
}


def every_tensor(model):
    """Return all parameters and buffers by name, saved or not. Tied weights appear under each name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_same_tensors(model, expected):
    tensors, expected_tensors = every_tensor(model), every_tensor(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", name
        assert torch.equal(tensor, expected_tensors[name]), name


def assert_std(tensor, expected, name):
    """Check that the standard deviation is within four standard errors of `expected`."""
    tolerance = 4 / (2 * tensor.numel()) ** 0.5
    assert tensor.std().item() == pytest.approx(expected, rel=tolerance), name


def tie_groups(model):
    """Return the sets of names, among source, target and head, that share a tensor."""
    storage = {
        "source": model.get_encoder().embed_tokens.weight,
        "target": model.get_decoder().embed_tokens.weight,
        "head": model.lm_head.weight,
    }
    return {frozenset(other for other in storage if storage[other] is storage[name]) for name in storage}


def expected_groups(config):
    groups = [["source"]]
    for name, is_tied in (("target", config.share_embeddings), ("head", config.tie_word_embeddings)):
        groups += [] if is_tied else [[]]
        groups[-1].append(name)
    return set(map(frozenset, groups))
