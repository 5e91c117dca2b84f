"""Parallelism: two processes share the weights of a model, and compute its logits."""

import multiprocessing
import os
import socket

import torch
from tiny_models import random_batch, tiny_model
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from metaphrase.modeling import MetaphraseForConditionalGeneration


def compare_logits(rank, port, folder, inputs, expected):
    """Load a part of the weights in one of two processes, and compare the logits."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = DistributedConfig(tp_plan="auto")
    model = MetaphraseForConditionalGeneration.from_pretrained(folder, distributed_config=config)
    for stack in (model.model.encoder, model.model.decoder):
        assert isinstance(stack.layers[0].self_attn.q_proj.weight, DTensor)
        assert isinstance(stack.layers[0].mlp.down_proj.weight, DTensor)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_two_processes_have_the_logits_of_one(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    inputs = random_batch(model.config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A fork need not import torch again.
    context = multiprocessing.get_context("fork")
    arguments = port, tmp_path, inputs, model(**inputs).logits
    processes = [context.Process(target=compare_logits, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
