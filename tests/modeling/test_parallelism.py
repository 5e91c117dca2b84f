"""Tensor parallelism: two processes share the weights of a model, and compute its logits."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from tiny_models import random_batch, tiny_model

SCRIPT = """
import sys
import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from metaphrase.modeling import MetaphraseForConditionalGeneration

folder = sys.argv[1]
config = DistributedConfig(tp_plan="auto")
model = MetaphraseForConditionalGeneration.from_pretrained(folder, distributed_config=config)
inputs, expected = torch.load(f"{folder}/inputs.pt")
for stack in (model.model.encoder, model.model.decoder):
    assert isinstance(stack.layers[0].self_attn.q_proj.weight, DTensor)
    assert isinstance(stack.layers[0].mlp.down_proj.weight, DTensor)
with torch.no_grad():
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
"""


def test_two_processes_have_the_logits_of_one(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    inputs = random_batch(model.config)
    with torch.no_grad():
        torch.save((inputs, model(**inputs).logits), tmp_path / "inputs.pt")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command += [str(tmp_path / "script.py"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "match nothing" not in result.stderr
