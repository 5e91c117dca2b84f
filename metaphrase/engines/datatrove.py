"""A step of datatrove's pipelines around `Generator`. Needs the extra `datatrove`."""

import itertools
from collections.abc import Iterator
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from metaphrase.inference.generator import Generator


class GenerateStep(PipelineStep):
    """Step that writes the target of each document into the document's metadata."""

    type = "Generation"
    name = "Metaphrase"

    def __init__(
        self,
        name_or_path: str | list[str],
        *,
        key: str = "target",
        seed: int = 42,
        loading: dict[str, Any] | None = None,
        **options: Any,
    ):
        """Set the step up. Each task loads the model.

        Args:
            name_or_path: As for `Generator.from_pretrained`, with the arguments `loading`.
            key: Entry of the metadata. It holds a text, or a list of texts with `num_return_sequences` above 1.
            seed: Seed for sampling. Each task adds its rank.
            **options: Arguments of `generate_stream`, such as `num_beams=4` or `chunk_size=512`.
        """
        super().__init__()
        self.name_or_path, self.key, self.seed = name_or_path, key, seed
        self.loading, self.options = loading or {}, options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents in order, with their targets. See `PipelineStep`."""
        generator = Generator.from_pretrained(self.name_or_path, **self.loading)
        documents, decoded = itertools.tee(data)
        seed, options = self.seed + rank, {"num_return_sequences": 1} | self.options
        sources = (document.text for document in documents)
        results = generator.generate_stream(sources, seed=seed, return_scores=False, **options)
        # A document is there as soon as its result is.
        for candidates, document in zip(results, decoded, strict=False):
            texts = [candidate.text for candidate in candidates]
            document.metadata[self.key] = texts[0] if len(texts) == 1 else texts
            self.stat_update("documents")
            yield document
        self.stat_update("unfinished targets", value=generator.num_unfinished)
