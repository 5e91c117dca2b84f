"""Parallelism: two processes share the weights of a model, or two stages its layers, and compute its logits."""

import copy
import multiprocessing
import os

import pytest
import torch
from job_server import free_port
from tiny_models import random_batch, tiny_model
from torch import nn
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
    # A fork need not import torch again.
    context = multiprocessing.get_context("fork")
    arguments = free_port(), tmp_path, inputs, model(**inputs).logits
    processes = [context.Process(target=compare_logits, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


class Skipped(nn.Identity):
    """A layer of the other stage."""

    self_attn = None

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def run_in_stages(stack, **inputs):
    """Run the first layer and the other layers as two stages, and pass on what the plan names."""
    first, second = copy.deepcopy(stack), copy.deepcopy(stack)
    assert list(stack._pp_plan) == ["embed_tokens", "layers", "norm"]
    first.layers[1], first.norm, second.layers[0] = Skipped(), nn.Identity(), Skipped()
    states = first(**inputs).last_hidden_state
    return second(**inputs | {"input_ids": None, "inputs_embeds": states}).last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_two_stages_have_the_logits_of_the_model(kind):
    model = tiny_model(position_embedding_type=kind)
    inputs = random_batch(model.config)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    output = run_in_stages(model.get_encoder(), **source)
    target = {"encoder_hidden_states": output, "encoder_attention_mask": inputs["attention_mask"]}
    states = run_in_stages(model.get_decoder(), input_ids=inputs["decoder_input_ids"], **target)
    torch.testing.assert_close(model.project(states), model(**inputs).logits)
