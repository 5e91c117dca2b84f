import torch

SOURCES, TARGETS = (5, 1, 19, 8), (3, 7, 2, 18)


def ragged_pairs(config, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rows(lengths, vocab_size):
        return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]

    return rows(SOURCES, config.vocab_size), rows(TARGETS, config.decoder_vocab_size)


def packed(config):
    sources, targets = ragged_pairs(config)
    lengths = {"source_lengths": torch.tensor(SOURCES), "target_lengths": torch.tensor(TARGETS)}
    lengths |= {"longest_source": max(SOURCES), "longest_target": max(TARGETS)}
    return {"input_ids": torch.cat(sources)[None], "labels": torch.cat(targets)[None], **lengths}


def gradients(model, inputs, **kwargs):
    model.zero_grad()
    output = model(**inputs, **kwargs)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(actual, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-5, atol=1e-5 * max(1, float(gradient.abs().max())), msg=name
        )
