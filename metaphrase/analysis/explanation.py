"""Explanation of a pair: tokens, shapes, masks, attention, teacher forcing, next tokens, and the tree of a beam search."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from metaphrase.analysis.alignment import cross_attention, showing_attention
from metaphrase.analysis.scoring import forced_inputs
from metaphrase.inference.batches import decode, evaluating, longest_source, read_options
from metaphrase.inference.generator import Generator
from metaphrase.tokenization import readable_tokens

NUM_CANDIDATES = 10
DEFAULT_BEAMS, DEFAULT_TOP_K, DEFAULT_TOP_P = 4, 5, 0.9
# Options that both searches take.
_SHARED_OPTIONS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "repetition_penalty")
_SHARED_OPTIONS += ("no_repeat_ngram_size", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id")
_SHARED_OPTIONS += ("decoder_start_token_id",)


@dataclass(frozen=True)
class Cut:
    """Distribution of the next token after top-k or top-p."""

    size: int  # number of tokens that remain
    probabilities: list[float]  # of each candidate of the step, 0 for a token that was cut
    choice: int  # id of the drawn token
    token: str


@dataclass(frozen=True)
class Step:
    """Next tokens at one position of a path. The tokens are the most probable ones, best first, in a readable form."""

    ids: list[int]
    tokens: list[str]
    probabilities: list[float]  # in the model's distribution
    choice: int  # id of the token on the path
    token: str
    beam_choice: int | None  # id on the best hypothesis of beam search; `None` if that left the path earlier
    top_k: Cut
    top_p: Cut


@dataclass
class BeamNode:
    """Candidate of a beam search: a hypothesis and its newest token."""

    parent: int | None  # index of the node before, `None` at the first step
    step: int  # number of the decoding step, from 0
    id: int
    token: str
    total: float  # sum of log-probabilities up to the newest token
    state: str = "pruned"  # or `kept` for the next step, `finished`, or `open` if the search ended before the next step
    rank: int | None = None  # among the results, from 1
    score: float | None = None  # of a result: the total divided by a power of the length


@dataclass(frozen=True)
class BeamTree:
    num_beams: int
    nodes: list[BeamNode]  # step by step, and best first in each step
    best_ids: list[int]


def _record_beam_search(generator: Generator, source: Sequence[int], options: Mapping[str, Any]) -> BeamTree:
    """Return the tree of a beam search, which `generate()` runs. One beam becomes `DEFAULT_BEAMS`."""
    config = generator.model.generation_config
    num_beams = options.get("num_beams") or config.num_beams or 1
    num_beams = num_beams if num_beams > 1 else DEFAULT_BEAMS
    names = (*_SHARED_OPTIONS, "length_penalty", "early_stopping")
    options = {name: options[name] for name in names if name in options}
    options |= {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
    ends = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or [])
    nodes: list[BeamNode] = []
    # For each hypothesis, without the start token, the index of its node.
    indices: dict[tuple[int, ...], int | None] = {(): None}

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record the candidates of a step, as a logits processor that changes no score."""
        count, num_open, candidates = max(2, 1 + len(ends)) * num_beams, 0, []
        # The first step has the same prefix in all rows.
        rows = dict(zip(map(tuple, input_ids[:, 1:].tolist()), scores.float(), strict=True))
        for prefix in filter(indices.__contains__, rows):
            parent, total, log_probabilities = indices[prefix], 0.0, rows[prefix]
            if parent is not None:
                total = nodes[parent].total
                nodes[parent].state = "kept"
            best = log_probabilities.topk(min(count, len(log_probabilities)))
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates += [(total + value, prefix, token) for value, token in pairs if value > -1e8]
        candidates.sort(key=lambda candidate: -candidate[0])
        for rank, (total, prefix, token) in enumerate(candidates[:count]):
            node = BeamNode(indices[prefix], input_ids.shape[1] - 1, token, "", total)
            if token in ends and rank < num_beams:
                node.state = "finished"
            elif token not in ends and num_open < num_beams:
                node.state = "open"  # the next step makes this `kept`
                num_open += 1
            indices[*prefix, token] = len(nodes)
            nodes.append(node)
        return scores

    [results] = decode(generator.model, [source], return_scores=True, logits_processor=[record], **options)
    for rank, result in enumerate(results, start=1):
        if (index := indices.get(tuple(result.ids))) is not None:
            nodes[index].state, nodes[index].rank, nodes[index].score = "finished", rank, result.score
    for node, token in zip(nodes, readable_tokens(generator.tokenizers.target, [n.id for n in nodes]), strict=True):
        node.token = token
    return BeamTree(num_beams, nodes, results[0].ids)


def _describe_steps(
    generator: Generator, source: list[int], path: list[int], beam_ids: list[int], seed: int, options: Mapping[str, Any]
) -> list[Step]:
    """Describe the next tokens at each position of a path."""
    model, tokenizer = generator.model, generator.tokenizers.target
    with evaluating([model]), torch.inference_mode():
        inputs = forced_inputs(model, [source], [path], options.get("decoder_start_token_id"))
        # On the CPU, for the same draws on every device.
        logits = model(**inputs, use_cache=False, return_dict=True).logits[0].float().cpu()
    best = logits.softmax(dim=-1).topk(min(NUM_CANDIDATES, logits.shape[-1]))
    scaled = TemperatureLogitsWarper(float(options.get("temperature") or 1.0))(None, logits)
    top_k, top_p = options.get("top_k") or DEFAULT_TOP_K, float(options.get("top_p") or DEFAULT_TOP_P)
    rng = torch.Generator().manual_seed(seed)
    cuts = []
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        probabilities = warper(None, scaled).softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=rng)[:, 0].tolist()
        sizes, shares = (probabilities > 0).sum(dim=-1).tolist(), probabilities.gather(1, best.indices).tolist()
        cuts.append(list(map(Cut, sizes, shares, drawn, readable_tokens(tokenizer, drawn))))
    steps, texts = [], readable_tokens(tokenizer, path)
    columns = zip(best.indices.tolist(), best.values.tolist(), path, texts, *cuts, strict=True)
    for index, (ids, shares, token, text, *both) in enumerate(columns):
        beam_choice = beam_ids[index] if path[:index] == beam_ids[:index] and index < len(beam_ids) else None
        steps.append(Step(ids, readable_tokens(tokenizer, ids), shares, token, text, beam_choice, *both))
    return steps


MASK_PADDING = 2  # padding that the masks show, as in a batch with a longer source
# Masks add the smallest number of a type to a score, or minus infinity. The smallest float16 is -65504.
MASKED_SCORE = -3e4
_POSITIONS = re.compile(r"position|relative_attention_bias|rotary|alibi", re.IGNORECASE)


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence, and the words that they form. A special token is a word."""

    ids: list[int]
    tokens: list[str]
    words: list[str]
    word_ids: list[int]  # index of the word of each token


@dataclass(frozen=True)
class Stage:
    """A module of the model that ran: its name, its class and the shape of its output."""

    name: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PositionMap:
    """Position encoding that a module returned."""

    name: str
    kind: str  # `added` to the embeddings, `rotary` (cosines that rotate queries and keys), or `bias` of the attention scores
    values: np.ndarray  # (1, length, features) in float32; of a bias (heads, query, key)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Stages of one pair in a model. T is the number of target tokens, S that of source tokens.

    Attributes:
        source_tokens: S tokens that the encoder reads.
        decoder_tokens: T tokens that the decoder reads: the start token, then the target without its last token.
        stages: Modules in the order in which they returned. Of several layers only the first is listed.
        masks: For each kind of attention True where a query may read a key, `(query, key)`. As keys the source has some padding
            tokens more.
        attentions: For each kind of attention the weights `(layers, heads, query, key)` in float32. Rows sum to 1.
        probabilities: Probability of each label, `(T,)`.
        ranks: Rank of each label among all tokens, from 1, `(T,)`.
        paths: Next tokens along `target`, `greedy` and `beam`. A path equal to an earlier one is left out.
        notes: Stages that this model does not show, one sentence each.
    """

    source: str
    target: str
    is_generated: bool
    source_tokens: Tokens
    decoder_tokens: Tokens
    target_tokens: Tokens
    stages: list[Stage]
    positions: list[PositionMap]
    masks: dict[str, np.ndarray]
    attentions: dict[str, np.ndarray]
    probabilities: np.ndarray
    ranks: np.ndarray
    paths: dict[str, list[Step]]
    beam_tree: BeamTree
    notes: list[str]

    @property
    def loss(self) -> float:
        """Mean negative log-probability of a label, in nats."""
        return float(-np.log(np.maximum(self.probabilities, 1e-38)).mean())


def explain(
    generator: Generator, source: str, target: str | None = None, *, seed: int = 42, **generation_kwargs
) -> Explanation:
    """Explain one pair by forward passes, a greedy search and a beam search.

    Args:
        generator: Model and tokenizers. The model keeps its mode and its attention kernel.
        target: The target text. By default the model generates the target with the generation options.
        seed: Seed of the tokens that are drawn with top-k and top-p.
        **generation_kwargs: As for `generate()`. The searches use the lengths, penalties and forced tokens.
    """
    model, tokenizer = generator.model, generator.tokenizers.target
    generation_kwargs = read_options(generation_kwargs)
    attention = cross_attention(generator, source, target, **(generation_kwargs if target is None else {}))
    source_ids, target_ids = attention.source_ids, attention.target_ids
    inputs = forced_inputs(model, [source_ids], [target_ids], generation_kwargs.get("decoder_start_token_id"))
    with showing_attention(model), torch.inference_mode():
        with _recording_modules(model) as (stages, positions):
            output = model(**inputs, output_attentions=True, use_cache=False, return_dict=True)
        masks = _find_masks(model, inputs)
    weights, sizes = {}, {"encoder": len(source_ids), "decoder": len(target_ids), "cross": len(source_ids)}
    for name, num_keys in sizes.items():
        layers = getattr(output, f"{name}_attentions", None) or [None]
        # (1, heads, query, key)
        if all(layer is not None and layer.ndim == 4 and layer.shape[3] == num_keys for layer in layers):
            weights[name] = torch.cat([layer.float().cpu() for layer in layers]).numpy()
    logits = output.logits[0].float()
    labels = torch.tensor(target_ids, device=logits.device)[:, None]
    shared = {name: value for name, value in generation_kwargs.items() if name in _SHARED_OPTIONS}
    tree = _record_beam_search(generator, source_ids, generation_kwargs)
    [[greedy]] = decode(model, [source_ids], **shared, num_beams=1, do_sample=False, num_return_sequences=1)
    paths, steps = {"target": target_ids, "greedy": greedy.ids, "beam": tree.best_ids}, {}
    for index, (name, ids) in enumerate(paths.items()):
        if ids and ids not in list(paths.values())[:index]:
            steps[name] = _describe_steps(generator, source_ids, ids, tree.best_ids, seed, generation_kwargs)
    decoder_ids = inputs["decoder_input_ids"][0].tolist()
    missing = [name for name in sizes if name not in weights]
    notes = [f"{name.capitalize()} attention: the model returns no weights for each query and key." for name in missing]
    if not positions:
        notes.append("Position encodings: no module of the model returns any.")
    if not masks:
        notes.append("Masks: the model has no positions for padding behind this source.")
    # The words of the decoder's input are those of the target, one token later.
    target_words, word_ids = attention.target_words, attention.target_word_ids
    decoder_word_ids = None if word_ids is None else [None, *word_ids[:-1]]
    return Explanation(
        source=source,
        target=attention.target,
        is_generated=target is None,
        source_tokens=_group(source_ids, attention.source_tokens, attention.source_words, attention.source_word_ids),
        decoder_tokens=_group(decoder_ids, readable_tokens(tokenizer, decoder_ids), target_words, decoder_word_ids),
        target_tokens=_group(target_ids, attention.target_tokens, target_words, word_ids),
        stages=stages,
        positions=positions,
        masks=masks,
        attentions=weights,
        probabilities=logits.softmax(dim=-1).gather(1, labels)[:, 0].cpu().numpy(),
        # Tokens of equal logits share the best rank.
        ranks=(1 + (logits > logits.gather(1, labels)).sum(dim=-1)).cpu().numpy(),
        paths=steps,
        beam_tree=tree,
        notes=notes,
    )


def _group(ids: list[int], tokens: list[str], words: list[str], word_ids: list[int | None] | None) -> Tokens:
    """Group tokens to words. A special token is a word, and without `word_ids` each token is."""
    labels, groups, previous = [], [], None
    for token, word in zip(tokens, word_ids or [None] * len(tokens), strict=True):
        if word is None or word != previous:
            labels.append(token if word is None else words[word])
        groups.append(len(labels) - 1)
        previous = word
    return Tokens(ids, tokens, labels, groups)


@contextlib.contextmanager
def _recording_modules(model: PreTrainedModel) -> Iterator[tuple[list[Stage], list[PositionMap]]]:
    """Record output shapes and position encodings of all modules, but of the first layers only."""
    stages: list[Stage] = []
    positions: list[PositionMap] = []

    def record(name: str, module: nn.Module, _, output) -> None:
        if _POSITIONS.search(name.rpartition(".")[2]):
            positions.extend(_read_positions(name, output))
        output = tuple(output.values()) if isinstance(output, dict) else output
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, torch.Tensor) and not isinstance(module, nn.Dropout):
            stages.append(Stage(name, type(module).__name__, tuple(output.shape)))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            layer = next((part for part in name.split(".") if part.isdigit()), "0")
            if name and layer == "0":
                hooks.enter_context(module.register_forward_hook(functools.partial(record, name)))
        yield stages, positions


def _read_positions(name: str, output) -> list[PositionMap]:
    """Return the position encoding in a module's output, if it has a known shape."""
    # Cosines show the same angles as the sines that follow them.
    kind, values = ("rotary", output[0]) if isinstance(output, tuple) else ("added", output)
    if not isinstance(values, torch.Tensor):
        return []
    values = values.detach().float().cpu()
    if values.ndim == 4 and len(values) == 1:
        kind, values = "bias", values[0]
    elif values.ndim == 3 and "bias" in name.rpartition(".")[2]:
        kind, values = "bias", values.permute(2, 0, 1)  # (query, key, heads) -> (heads, query, key)
    values = values[None] if values.ndim == 2 else values
    is_known = values.ndim == 3 and (kind == "bias" or len(values) == 1)
    return [PositionMap(name, kind, values.numpy())] if is_known else []


class _ScoreRecorder(TorchFunctionMode):
    """Record where any attention score is not masked, by the shape `(query, key)` of the scores."""

    def __init__(self):
        super().__init__()
        self.masks: dict[tuple[int, ...], torch.Tensor] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "softmax" and args and args[0].ndim >= 3:
            mask = (args[0].flatten(end_dim=-3) > MASKED_SCORE).any(dim=0)
            self.masks[mask.shape] = self.masks.get(mask.shape, False) | mask
        return function(*args, **(kwargs or {}))


def _find_masks(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the masks of a pass with padding, by the scores that enter the softmax; none without positions for the padding."""
    num_source, num_target = inputs["input_ids"].shape[1], inputs["decoder_input_ids"].shape[1]
    # Shapes tell the kinds of attention apart, if source and target differ in length.
    num_padding = MASK_PADDING + (num_source + MASK_PADDING == num_target)
    width, limit = num_source + num_padding, longest_source(model)
    if limit is not None and width > limit:
        return {}
    padding = {"input_ids": model.config.pad_token_id or 0, "attention_mask": 0}
    padded = {name: nn.functional.pad(inputs[name], (0, num_padding), value=value) for name, value in padding.items()}
    with _ScoreRecorder() as recorder:
        model(**inputs | padded, output_attentions=True, use_cache=False, return_dict=True)
    shapes = {"encoder": (width, width), "decoder": (num_target, num_target), "cross": (num_target, width)}
    masks = {name: recorder.masks[shape].cpu().numpy() for name, shape in shapes.items() if shape in recorder.masks}
    # Rows of padding say nothing: no one reads them.
    return {name: mask[:num_source] if name == "encoder" else mask for name, mask in masks.items()}
