"""What all tests share: the folder of the tests on the path, so that they can import `tiny_models`, and one thread."""

import os
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as flex_integration

# pytest's import mode "importlib" leaves the path alone. Last on the path, so that nothing installed is hidden.
sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """transformers compiles flex attention, which takes seconds for each shape; written out, it computes the same."""
    monkeypatch.setattr(flex_integration, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *_, _compile, **rest: create_block_mask(*_, **rest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def same_environment():
    """transformers writes its FSDP settings into the environment."""
    with patch.dict(os.environ):
        yield
