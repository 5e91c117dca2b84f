"""Next tokens of each decoding step, and the tree of hypotheses of a beam search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from metaphrase.decoding.options import plain_options
from metaphrase.inference.batches import decode
from metaphrase.inference.generator import Generator
from metaphrase.tokenization import readable_tokens

NUM_CANDIDATES = 10
DEFAULT_BEAMS, DEFAULT_TOP_K, DEFAULT_TOP_P = 4, 5, 0.9
# Options that both searches take. Beam search also takes those of `_BEAM_OPTIONS`.
_SHARED_OPTIONS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "repetition_penalty")
_SHARED_OPTIONS += ("no_repeat_ngram_size", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id")
_SHARED_OPTIONS += ("decoder_start_token_id",)
_BEAM_OPTIONS = ("length_penalty", "early_stopping")


@dataclass(frozen=True)
class Cut:
    """Distribution of the next token after top-k or top-p.

    Attributes:
        size: Number of tokens that remain.
        probabilities: Probability of each candidate of the step, 0 for a token that was cut.
        choice: Id of the drawn token.
        token: The drawn token in a readable form.
    """

    size: int
    probabilities: list[float]
    choice: int
    token: str


@dataclass(frozen=True)
class Step:
    """Next tokens at one position of a path.

    Attributes:
        ids: The most probable tokens, best first. The first is the choice of greedy search.
        tokens: These tokens in a readable form.
        probabilities: Their probabilities in the model's distribution.
        choice: Id of the token on the path.
        token: The token on the path in a readable form.
        beam_choice: Id on the best hypothesis of beam search; `None` if that left the path earlier.
        top_k: Distribution after top-k.
        top_p: Distribution after top-p.
    """

    ids: list[int]
    tokens: list[str]
    probabilities: list[float]
    choice: int
    token: str
    beam_choice: int | None
    top_k: Cut
    top_p: Cut


@dataclass
class BeamNode:
    """Candidate of a beam search: a hypothesis and its newest token.

    Attributes:
        parent: Index of the node before, `None` at the first step.
        step: Number of the decoding step, from 0.
        id: Id of the newest token.
        token: The newest token in a readable form.
        total: Sum of log-probabilities up to the newest token.
        state: `kept` for the next step, `finished`, `pruned`, or `open` if the search ended before the next step.
        rank: Rank among the results, from 1; `None` for other nodes.
        score: Score of a result: the total divided by a power of the length.
    """

    parent: int | None
    step: int
    id: int
    token: str
    total: float
    state: str = "pruned"
    rank: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class BeamTree:
    """Candidates of a beam search, step by step and best first in each step."""

    num_beams: int
    nodes: list[BeamNode]
    best_ids: list[int]


def search_ids(generator: Generator, source: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """Return the ids that greedy search finds."""
    options = {name: value for name, value in plain_options(options).items() if name in _SHARED_OPTIONS}
    [[best]] = decode(generator.model, [source], **options, num_beams=1, do_sample=False, num_return_sequences=1)
    return best.ids


def record_beam_search(generator: Generator, source: Sequence[int], options: Mapping[str, Any]) -> BeamTree:
    """Return the tree of a beam search, which `generate()` runs.

    The beam size is `num_beams` of the options or of the model. A size of 1 becomes `DEFAULT_BEAMS`.
    """
    options, config = plain_options(options), generator.model.generation_config
    num_beams = options.get("num_beams") or config.num_beams or 1
    num_beams = num_beams if num_beams > 1 else DEFAULT_BEAMS
    options = {name: options[name] for name in (*_SHARED_OPTIONS, *_BEAM_OPTIONS) if name in options}
    ends = config.eos_token_id
    recorder = _BeamRecorder(num_beams, {ends} if isinstance(ends, int) else set(ends or []))
    [results] = decode(
        generator.model,
        [source],
        **options,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        return_scores=True,
        logits_processor=[recorder],
    )
    nodes = recorder.nodes
    for rank, result in enumerate(results, start=1):
        node = recorder.find(result.ids)
        if node is not None:
            node.state, node.rank, node.score = "finished", rank, result.score
    tokens = readable_tokens(generator.tokenizers.target, [node.id for node in nodes])
    for node, token in zip(nodes, tokens, strict=True):
        node.token = token
    return BeamTree(num_beams, nodes, results[0].ids)


class _BeamRecorder(LogitsProcessor):
    """Recorder of the candidates of a beam search over one source. Changes no score."""

    def __init__(self, num_beams: int, ends: set[int]):
        self.num_beams, self.ends = num_beams, ends
        self.nodes: list[BeamNode] = []
        # For each hypothesis, without the start token, the index of its node.
        self.indices: dict[tuple[int, ...], int | None] = {(): None}
        self.prompt_length: int | None = None
        self.step = -1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        self.step += 1
        candidates, prefixes = [], set()
        count = max(2, 1 + len(self.ends)) * self.num_beams
        for ids, log_probabilities in zip(input_ids[:, self.prompt_length :].tolist(), scores.float(), strict=True):
            prefix = tuple(ids)
            # The first step has the same prefix in all rows.
            if prefix in prefixes or prefix not in self.indices:
                continue
            prefixes.add(prefix)
            parent = self.indices[prefix]
            total = 0.0
            if parent is not None:
                total = self.nodes[parent].total
                self.nodes[parent].state = "kept"
            best = log_probabilities.topk(min(count, len(log_probabilities)))
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > -1e8:
                    candidates.append((total + value, prefix, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        self._add(candidates[:count])
        return scores

    def _add(self, candidates: list[tuple[float, tuple[int, ...], int]]) -> None:
        num_open = 0
        for rank, (total, prefix, token) in enumerate(candidates):
            node = BeamNode(self.indices[prefix], self.step, token, "", total)
            if token in self.ends and rank < self.num_beams:
                node.state = "finished"
            elif token not in self.ends and num_open < self.num_beams:
                # The next step makes this `kept`.
                node.state = "open"
                num_open += 1
            self.indices[*prefix, token] = len(self.nodes)
            self.nodes.append(node)

    def find(self, ids: Sequence[int]) -> BeamNode | None:
        index = self.indices.get(tuple(ids))
        return None if index is None else self.nodes[index]


def describe_steps(
    generator: Generator,
    logits: torch.Tensor,
    path: list[int],
    beam_ids: list[int],
    seed: int,
    options: Mapping[str, Any],
) -> list[Step]:
    """Describe the next tokens at each position of a path.

    Args:
        generator: Its tokenizer makes tokens readable.
        logits: Logits of a pass over the path, `(path, vocab)`.
        path: Ids of the path.
        beam_ids: Ids of the best hypothesis of beam search.
        seed: Seed of the drawn tokens.
        options: `temperature`, `top_k` and `top_p`.
    """
    # In float32, and on the CPU for the same draws on every device.
    logits = logits.cpu()
    best = logits.softmax(dim=-1).topk(min(NUM_CANDIDATES, logits.shape[-1]))
    scaled = TemperatureLogitsWarper(float(options.get("temperature") or 1.0))(None, logits)
    top_k, top_p = options.get("top_k") or DEFAULT_TOP_K, options.get("top_p") or DEFAULT_TOP_P
    rng = torch.Generator().manual_seed(seed)
    cuts = []
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(float(top_p))):
        probabilities = warper(None, scaled).softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=rng)[:, 0].tolist()
        sizes = (probabilities > 0).sum(dim=-1).tolist()
        names = readable_tokens(generator.tokenizers.target, drawn)
        cuts.append(list(zip(sizes, probabilities.gather(1, best.indices).tolist(), drawn, names, strict=True)))
    path_tokens = readable_tokens(generator.tokenizers.target, path)
    steps = []
    for index, token in enumerate(path):
        ids = best.indices[index].tolist()
        is_beam = path[:index] == beam_ids[:index] and index < len(beam_ids)
        steps.append(
            Step(
                ids=ids,
                tokens=readable_tokens(generator.tokenizers.target, ids),
                probabilities=best.values[index].tolist(),
                choice=token,
                token=path_tokens[index],
                beam_choice=beam_ids[index] if is_beam else None,
                top_k=Cut(*cuts[0][index]),
                top_p=Cut(*cuts[1][index]),
            )
        )
    return steps
