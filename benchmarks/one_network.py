"""Times the decoding step of `DecoderState` beside a lower bound of one that calls the network's own layers.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/one_network.py benchmarks/results/one_network.json

"bare" and "modules" are `DecoderState` with the layers of `MetaphraseDecoder`, called as functions and as modules. They share
its cache, tables, prepared products and attention, and have neither masks nor dropout nor outputs to record. "network" is
`MetaphraseDecoder.forward`. Contestants take short turns of processor time.
"""

import contextlib
import copy
import json
import statistics
import sys
import time
from collections import Counter, defaultdict, namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from machine import describe_machine
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metaphrase.decoding import beam_search, decoder_state, fast_generation, quantization
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.layers import MetaphraseDecoderLayer
from metaphrase.modeling.operators import acceleration, plain_linear

ROUNDS, STEPS, SOURCE_LENGTH, ZERO = 5, 20, 14, torch.zeros(1)
# Keys for the kernel. The network reads only the number of rows, to fold the beams of a source.
Keys = namedtuple("Keys", "shape flat")


class NetworkStep:
    """Mixin for a state that calls the layers of the network, with itself as their cache."""

    is_updated, absorbed = SimpleNamespace(get=lambda index: True), None
    self_attention_cache = cross_attention_cache = property(lambda self: self)

    def _pass_layer(self, index, layer, hidden_states, rotation):
        if index == 0:
            hidden_states, NetworkStep.absorbed = hidden_states[:, None], self._absorbed
        rows = self._source_cache.keys.shape[1]
        if self._absorbed:
            rows *= self.copies
        layer.keys, layer.values = Keys((rows,), self._source_views[index][0]), self._source_views[index][1]
        masks = self._target_biases[self._bias_of_layer[index]], None, self._source_bias
        output = self.decoder.layers[index](hidden_states, None, *masks, past_key_values=self)
        return output[:, 0] if index == len(self.layers) - 1 else output

    def update(self, key, value, index):
        for entry, states in zip(self._new_entries[index], (key, value), strict=True):
            entry.copy_(states.view(entry.shape))
        keys, values = self._target_views[index]
        return Keys((self._target_cache.keys.shape[1],), keys), values


STATES = decoder_state.DecoderState, beam_search.BeamState
NETWORK_STATES = [type(f"Network{kind.__name__}", (NetworkStep, kind), {}) for kind in STATES]


def attend(module, query, key, value, bias, scaling, **kwargs):
    if module.is_cross and NetworkStep.absorbed:
        return NetworkStep.absorbed[module.layer_idx].add_to(ZERO, query.reshape(len(query), -1)), None
    rows, copies = key.shape[0], query.shape[2]
    # The attention of `DecoderState`.
    scores = torch.baddbmm(ZERO, query.reshape(-1, *query.shape[2:]), key.flat, beta=0, alpha=scaling)
    if bias is not None:
        scores = scores.unflatten(0, (rows, -1)).add_(bias).flatten(0, 1)
    output = torch.bmm(scores.softmax(dim=-1), value)
    return (output if copies == 1 else output.unflatten(0, (rows, -1)).transpose(1, 2)), None


def prepare(decoder):
    """Let a decoder use one prepared product for linear layers with the same input, and the attention above."""

    def join(*layers, can_skip=False):
        product, rest = decoder_state.PreparedLinear(layers), []

        def multiply(states):
            if can_skip and NetworkStep.absorbed:
                return states
            output, *rest[:] = product(states.squeeze(1)).unsqueeze(1).chunk(len(layers), dim=-1)
            return output

        for layer in layers:
            vars(layer)["product"] = multiply if layer is layers[0] else lambda states: rest.pop(0)

    ALL_ATTENTION_FUNCTIONS.register("of_state", attend)
    for layer in decoder.layers:
        own, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        own.config = cross.config = copy.deepcopy(own.config)
        own.config._attn_implementation = "of_state"
        join(own.q_proj, own.k_proj, own.v_proj)
        for linear in (own.o_proj, cross.q_proj, cross.o_proj, mlp.up_proj, mlp.down_proj):
            join(linear, can_skip=linear in (cross.q_proj, cross.o_proj))
    for module in decoder.layers.modules():
        # Without `nn.Module.__getattr__`.
        vars(module).update(module._modules | module._parameters)


def linear(layer, states, activation=None):
    product = vars(layer).get("product")
    if product is None:
        return plain_linear(layer, states, activation)
    return product(states) if activation is None else activation(product(states))


@contextlib.contextmanager
def stripped(decoder, name):
    """Remove from the network what a contestant goes without."""
    with contextlib.ExitStack() as stack:
        if name in ("modules", "bare"):
            stack.enter_context(patch.multiple(acceleration, linear=linear, dropout=lambda states, **_: states))
            stack.enter_context(patch.object(acceleration, "add_dropout", lambda states, output, **_: states + output))
            plain = MetaphraseDecoderLayer.forward.__wrapped__
            stack.enter_context(patch.object(MetaphraseDecoderLayer, "forward", plain))
            stack.enter_context(
                patch.multiple(fast_generation, DecoderState=NETWORK_STATES[0], BeamState=NETWORK_STATES[1])
            )
        for kind in {type(module) for module in decoder.layers.modules()} if name == "bare" else ():
            stack.enter_context(patch.object(kind, "__call__", kind.forward, create=True))
        yield


def make_step(decoder, name, encoder_output, mask, beams):
    """Return a function that makes one decoding step of all rows."""
    tokens = torch.full((len(encoder_output),), 9)
    if name == "network":
        arguments = {"encoder_hidden_states": encoder_output, "encoder_attention_mask": mask}
        arguments["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return lambda: decoder(tokens.repeat_interleave(beams)[:, None], **arguments)
    state = (STATES if name == "state" else NETWORK_STATES)[beams > 1](decoder, encoder_output, mask)
    state.step(tokens)
    state.expand_beams(beams)
    return lambda: state.step(tokens.repeat_interleave(beams))


def profile(step):
    """Return the microseconds of parts of a step, and the calls of Python and of built-in functions."""
    seconds, counts = Counter(), Counter()

    def timed(part, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            start = time.process_time()
            output = function(*args, **kwargs)
            seconds[part] += time.process_time() - start
            return output

        return patch.object(owner, name, call)

    with (
        timed("products", decoder_state.PreparedLinear, "__call__"),
        timed("attention", STATES[0], "_attend"),
        timed("attention", decoder_state._AbsorbedAttention, "add_to"),
        timed("norms", torch, "layer_norm"),
        timed("cache", STATES[0], "_prepare_step"),
        timed("cache", STATES[1], "_prepare_step"),
    ):
        for _ in range(STEPS):
            step()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    step()
    sys.setprofile(None)
    parts = {part: 1e6 * value / STEPS for part, value in seconds.items()}
    return parts | {"python_calls": counts["call"], "built_in_calls": counts["c_call"]}


@torch.inference_mode()
def measure(models, batch, beams):
    """Return the report of one setting: medians of microseconds, and of the speed in times that of `DecoderState`."""
    sources = torch.randint(10, 1000, (batch, SOURCE_LENGTH))
    mask = (torch.arange(SOURCE_LENGTH) < torch.randint(7, 15, (batch, 1)).clamp(min=14 * (batch == 1))).long()
    encoder_output = models["state"].get_encoder()(sources, mask).last_hidden_state
    options = {"num_beams": beams, "do_sample": False, "early_stopping": beams > 1, "max_new_tokens": STEPS}
    values, results = defaultdict(lambda: defaultdict(list)), {}
    for number in range(ROUNDS):
        for name, model in list(models.items())[:: 1 if number % 2 else -1]:
            decoder = model.get_decoder()
            with stripped(decoder, name):
                step, start = make_step(decoder, name, encoder_output, mask, beams), time.process_time()
                for _ in range(STEPS):
                    results[name] = step()
                values[name]["step"].append(1e6 * (time.process_time() - start) / STEPS)
                for part, value in profile(step).items():
                    values[name][part].append(value)
                start = time.process_time()
                if name in ("state", "bare"):
                    ids = model.generate(sources, attention_mask=mask, **options)
                    results[name] = results[name], ids
                    values[name]["generate"].append(1e6 * (time.process_time() - start) / STEPS)
    torch.testing.assert_close(results["bare"], results["state"], atol=1e-3, rtol=1e-3)
    report = {name: {key: round(statistics.median(v)) for key, v in parts.items()} for name, parts in values.items()}
    for name, parts in values.items():
        for key in ("step", "generate") if "generate" in parts else ("step",):
            ratios = [ours / theirs for ours, theirs in zip(values["state"][key], parts[key], strict=True)]
            report[name][f"speed_of_{key}"] = round(statistics.median(ratios[1:]), 3)
    return report


def make_model(preset, dtype):
    """Return a model with random weights that writes no end."""
    torch.manual_seed(0)
    config = MetaphraseConfig.from_preset(preset, logits_bias=True, initializer_range=0.2)
    model = MetaphraseForConditionalGeneration(config).eval()
    model.lm_head.bias.data[config.eos_token_id] = -1e4
    if dtype == "int8":
        quantization.quantize(model)
    return model


def main() -> None:
    torch.set_num_threads(1)
    report = {"machine": describe_machine(1), "rounds": ROUNDS, "settings": {}}
    for preset in ("transformer-tiny", "transformer-base"):
        for dtype in ("float32", "int8"):
            plain, changed = make_model(preset, dtype), make_model(preset, dtype)
            prepare(changed.get_decoder())
            models = {"state": plain, "bare": changed, "modules": changed, "network": plain}
            for batch, beams in ((1, 1), (1, 4), (32, 1), (32, 4)):
                setting = f"{preset}, {dtype}, beam {beams}, batch {batch}"
                report["settings"][setting] = measure(models, batch, beams)
                print(setting, json.dumps(report["settings"][setting]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
