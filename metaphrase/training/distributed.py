"""Several processes: their begin and end, values of the first one, the seed of each, pairs that two share, sharded weights."""

import atexit
import contextlib
import functools
import gc
import os
import pickle
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainingArguments, set_seed

from metaphrase.errors import OF_FIRST_PROCESS, MetaphraseError
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.storage.weight_files import weight_names
from metaphrase.training.recipe.recipe import Recipe

Value = TypeVar("Value")
# A process waits as long as the first one works, and notices at once if that ends.
_LONGEST_WAIT = timedelta(days=7)


def join_processes(recipe: Recipe) -> None:
    """Prepare this process to join those that a launcher has started, and join them on a CPU. transformers does the rest."""
    os.environ |= variables_of_slurm(os.environ)
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or distributed.is_initialized():
        return
    # Without this, a script that ends with its training may be aborted. A group of the launcher's own stays.
    atexit.register(leave_processes)
    if recipe.use_cpu or not torch.accelerator.is_available():
        # On a CPU, transformers leaves torch's timeout of half an hour, while one process may read a corpus for longer.
        PartialState(cpu=True, backend=recipe.ddp_backend, timeout=timedelta(seconds=recipe.ddp_timeout))


def variables_of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for a task of `srun`, by its variables of Slurm; nothing in any other process.

    torch, accelerate and transformers do not read those of Slurm. A shell of `salloc` has no step.
    """
    size = variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", "1"))
    names = {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"}
    if int(size) < 2 or "RANK" in variables or not names <= variables.keys():
        return {}
    nodes = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    # `gpu[07-09,12],cpu1` begins with `gpu07`.
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).partition(",")[0]
    # `4(x2),1` is 4 on each of 2 machines, and 1 on the third.
    local_size = variables.get("SLURM_STEP_TASKS_PER_NODE", size).partition("(")[0].partition(",")[0]
    # Steps of one job may share a machine. Ports from 32768 on are for clients.
    port = 15_000 + (int(variables.get("SLURM_JOB_ID", 0)) + int(variables["SLURM_STEP_ID"])) % 15_000
    values = {"RANK": variables["SLURM_PROCID"], "WORLD_SIZE": size, "LOCAL_RANK": variables["SLURM_LOCALID"]}
    values |= {"LOCAL_WORLD_SIZE": local_size, "MASTER_ADDR": first, "MASTER_PORT": str(port)}
    return {name: variables.get(name, value) for name, value in values.items()}


@functools.cache
def _group_on_cpu(world: Any) -> Any:
    # No accelerator has to wait for what is sent here. `world` is the default group, which another one may follow.
    return distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)


def from_first_process(function: Callable[[], Value]) -> Value:
    """Return, in all processes, the value of a function that the first process calls. Raise its error in all of them.

    All processes must call this. The value must be such that it can be pickled.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return function()
    # Made before the first process works, since a group is waited for less long than its values.
    group = _group_on_cpu(distributed.group.WORLD)
    error, is_first = None, distributed.get_rank() == 0
    sent: list[Any] = [None, None]
    if is_first:
        try:
            sent[0] = function()
        except Exception as raised:
            error, sent[1] = raised, _as_sent(raised)
    distributed.broadcast_object_list(sent, src=0, group=group)
    if not is_first and (error := sent[1]) is not None:
        error.add_note(OF_FIRST_PROCESS)
    if error is not None:
        raise error
    return sent[0]


def _as_sent(error: Exception) -> Exception:
    """Return an error, or a plain one with its message if it cannot be sent."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def leave_processes() -> None:
    """Leave the process group, if there is one. Call this last, when no trainer or model is referenced any more.

    A trainer and its model keep the group's threads alive, which need the interpreter to free their gradients. torch aborts a
    process that exits meanwhile. The launcher then ends the other processes, even while they write.
    """
    if distributed.is_available() and distributed.is_initialized():
        # Trainer and model refer to each other.
        gc.collect()
        _group_on_cpu.cache_clear()
        distributed.destroy_process_group()


def is_data_parallel(arguments: TrainingArguments, accelerator: Accelerator) -> bool:
    """True if several processes train on pairs of their own. Processes of other kinds of parallelism share each batch."""
    return arguments.world_size > 1 and getattr(accelerator, "parallelism_config", None) is None


def ignore_repeated_pairs(labels: torch.Tensor, num_pairs: int, process_index: int) -> torch.Tensor:
    """Return the labels (B, T) of a last batch, with those of repeated pairs set to `IGNORED_LABEL`.

    accelerate repeats the first pairs of an epoch to give all processes batches of equal size. The last batches of all processes
    in order have `num_pairs` pairs that are no repeats; 0 or less means all.
    """
    if num_pairs <= 0:
        return labels
    num_counted = max(0, num_pairs - process_index * len(labels))
    return torch.cat([labels[:num_counted], torch.full_like(labels[num_counted:], IGNORED_LABEL)])


def seed_process(arguments: TrainingArguments, accelerator: Accelerator) -> None:
    """Seed each process but the first anew, so that each drops different entries. transformers seeds all processes alike."""
    # Processes that share a batch must drop alike.
    if arguments.process_index > 0 and is_data_parallel(arguments, accelerator):
        # Neither processes nor seeds share numbers.
        set_seed(np.random.SeedSequence([arguments.seed, arguments.process_index]).generate_state(1).item())


def check_same_in_all(**facts: Any) -> None:
    """Refuse processes that differ in data, versions or checkpoint. All processes must call this.

    They would wait for each other until the timeout, or add gradients of different vocabularies.

    Raises:
        MetaphraseError: If a value differs from that of the first process.
    """
    first, *rest = gather_object([facts])
    for number, other in enumerate(rest, start=1):
        if different := [f"{name} {first[name]} and {other[name]}" for name in facts if first[name] != other[name]]:
            raise MetaphraseError(
                "All processes must have the same data, versions and checkpoint, got in the processes 0 and "
                f"{number}: {'; '.join(different)}. Give all machines the same files and packages, and a shared `output_dir`."
            )


# Sharded weights


def keep_embeddings_together(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Accelerator.prepare` so that all embeddings and the head stay in the model's own FSDP unit.

    accelerate gives one embedding and the head units of their own (seen in 1.15). An embedding tied to them is then left behind,
    which FSDP refuses from torch 2.13 on. The loss reads the head's weight without calling the head, and would find it sharded.
    The model's own unit is gathered for the whole step.
    """

    def prepare_together(*objects: Any, **options: Any) -> Any:
        models = [model for model in objects if isinstance(model, nn.Module)]
        names = ("get_input_embeddings", "get_output_embeddings")
        hidden = [(model, name) for model in models for name in names if hasattr(model, name)]
        for model, name in hidden:
            setattr(model, name, lambda: None)
        try:
            return prepare(*objects, **options)
        finally:
            for model, name in hidden:
                delattr(model, name)

    return prepare_together


def class_before_sharding(model: nn.Module) -> type[nn.Module]:
    """Return the class that a model had before FSDP gave it another, which is saved with its code."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


def is_adapted(model: nn.Module) -> bool:
    """Return True if a model is a peft model with adapters. peft need not be installed."""
    return any(base.__module__.startswith("peft.") and base.__name__ == "PeftModel" for base in type(model).__mro__)


def is_sharded(model: nn.Module) -> bool:
    """True if each process holds only a share of the weights, by FSDP or by DeepSpeed's stage 3."""
    return isinstance(model, FSDPModule) or _is_partitioned(model)


def _is_partitioned(model: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def saves_whole_weights(state: AcceleratorState) -> bool:
    """True if checkpoints hold weights for `from_pretrained`, not only the share of each process."""
    if (fsdp := getattr(state, "fsdp_plugin", None)) is not None:
        return "FULL" in str(fsdp.state_dict_type)
    if (deepspeed := getattr(state, "deepspeed_plugin", None)) is None:
        return True
    zero = deepspeed.deepspeed_config.get("zero_optimization", {})
    # accelerate does not gather with "auto".
    return zero.get("stage") != 3 or zero.get("stage3_gather_16bit_weights_on_model_save") is True


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a whole weight. A weight that DeepSpeed has partitioned does not show it."""
    return getattr(weight, "ds_shape", weight.shape)


def gather_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a sharded model with whole weights, on each process. All processes must call this."""
    if _is_partitioned(model):
        state = {}
        for name, weight in model.state_dict(keep_vars=True).items():
            with _gathered(weight):
                state[name] = weight.detach().clone()
    else:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # Initial weights must not draw from training's random numbers. With DeepSpeed, `from_config` would partition them at once.
    with torch.random.fork_rng():
        whole = _new_model(model).to(model.device)
    whole.load_state_dict(state)
    # peft drops its wrapper when the adapter is merged.
    base = whole.get_base_model() if is_adapted(whole) else whole
    base.generation_config = model.generation_config
    return whole


def _new_model(model: PreTrainedModel) -> PreTrainedModel:
    if not is_adapted(model):
        return class_before_sharding(model)(model.config)
    import peft

    return peft.get_peft_model(_new_model(model.get_base_model()), model.active_peft_config)


def load_whole_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a folder into a model, sharded or not. All processes must call this.

    Raises:
        MetaphraseError: If the folder lacks a weight of the model.
    """
    # Not every file: exponential averages have the same names.
    state = {name: weight for file in weight_names(folder) for name, weight in load_file(folder / file).items()}
    # A tied weight is saved under one of its names.
    state |= {name: state[saved] for name, saved in model.all_tied_weights_keys.items() if saved in state}
    weights = model.state_dict(keep_vars=True)
    # Marian computes its positions and does not save them.
    if missing := weights.keys() - state.keys() - set(model._keys_to_ignore_on_save or ()):
        raise MetaphraseError(f"{folder} must hold all weights, got none for {', '.join(sorted(missing))}.")
    if not _is_partitioned(model):
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    # All processes gather in the same order.
    for name in filter(state.__contains__, weights):
        with _gathered(weights[name], written=True), torch.no_grad():
            weights[name].copy_(state[name])


def _gathered(weight: torch.Tensor, written: bool = False) -> contextlib.AbstractContextManager[None]:
    """Gather a weight inside this context. What the first process writes into it is partitioned afterwards."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if written else None)
