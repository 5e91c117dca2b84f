"""What all tests share: the folder of the tests on the path, so that they can import `tiny_models`, and one thread."""

import sys
from pathlib import Path

import pytest
import torch

# pytest's import mode "importlib" leaves the path alone. Last on the path, so that nothing installed is hidden.
sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
