"""Handler of Hugging Face's Inference Endpoints for this model."""

from typing import Any

import torch
from transformers import pipeline

TASK = "translation"
PREFIX = ""


class EndpointHandler:
    """The model of a folder."""

    def __init__(self, path: str = ""):
        """Load the model.

        Args:
            path: Folder of the repository.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pipeline = pipeline(TASK, model=path, device=device, trust_remote_code=True)

    def __call__(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer a request.

        Args:
            data: `inputs`, a text or a list of texts; and `parameters`, options of the pipeline and of `generate()`.

        Returns:
            A dictionary for each target, such as `{"translation_text": ...}`.
        """
        parameters = data.get("parameters") or {}
        if PREFIX:
            parameters = {"prefix": PREFIX, **parameters}
        return self.pipeline(data["inputs"], **parameters)
