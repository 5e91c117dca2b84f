"""Random numbers of several processes: those of dropout are each process's own, those of the order of pairs are shared.

Processes: whether as many were started as were asked for, one for each device, and how they meet and part.

Random states: those of Python, numpy and torch on the CPU, taken, set, made and kept.

Pairs that come twice, so that all processes have equal batches: they count once, in training and evaluation.
"""

import contextlib
import gc
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import distributed
from transformers import TrainingArguments

from metaphrase.modeling import IGNORED_LABEL


class ProcessSeedsMixin:
    """For a trainer, before its parents: processes after the first draw other numbers than it, and each other ones.

    transformers seeds all of them alike, so that all would drop the same entries of their batches. A resumed run goes on with the
    states of its checkpoint.
    """

    def get_train_dataloader(self):
        if not share_out_pairs(self.args, self.accelerator):
            return super().get_train_dataloader()
        # The order, for which accelerate takes the seed of this generator, is one for all processes.
        states = get_random_states()
        torch.default_generator.manual_seed(self.args.seed)
        try:
            return super().get_train_dataloader()
        finally:
            set_random_states(states)

    def _init_training_state(self, *args, **kwargs):
        # Processes that share out a batch must drop alike.
        if share_out_pairs(self.args, self.accelerator) and self.args.process_index > 0:
            words = np.random.SeedSequence([self.args.seed, self.args.process_index]).generate_state(3).tolist()
            random.seed(words[0])
            np.random.seed(words[1])  # noqa: NPY002
            # Those of accelerators too.
            torch.manual_seed(words[2])
        return super()._init_training_state(*args, **kwargs)


_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_processes() -> None:
    """Refuses the one process that `accelerate launch --cpu --num_processes N` starts in place of N.

    That launcher leaves the starting of processes to mpirun, and says nothing where there is none. It sets the address at which
    the processes would meet, but no rank.

    Raises:
        ValueError: If this is such a process.
    """
    is_from_launcher = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if is_from_launcher and not any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", *_MPI)):
        raise ValueError(
            "`accelerate launch` must start several processes on a CPU by `--multi_gpu --num_processes N`, got `--cpu`, "
            "with which it starts one. `torchrun --nproc_per_node N` starts them too."
        )


def meet_on_cpu(timeout: float, backend: str | None = None) -> None:
    """Lets several processes on a CPU meet, if there are any, and wait for each other so long: transformers would not say.

    Half an hour, torch's default, ends a run where one process reads a large corpus or scores the finished model.

    Args:
        timeout: Seconds.
        backend: Of the group; by default accelerate's choice.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=timeout))


def share_out_pairs(arguments: TrainingArguments, accelerator: Accelerator) -> bool:
    """Whether several processes have pairs of their own, each with the whole model; others share out the layers of one batch."""
    return arguments.world_size > 1 and getattr(accelerator, "parallelism_config", None) is None


def check_devices(num_devices: int) -> None:
    """Refuses one process with several GPUs, among which transformers would share out each batch by `torch.nn.DataParallel`.

    That cuts packed rows and the two passes of R-Drop in pieces.

    Args:
        num_devices: GPUs of this process.

    Raises:
        ValueError: If they are several.
    """
    if num_devices > 1:
        raise ValueError(
            f"Each GPU must have a process of its own, got one process with {num_devices} GPUs. Start one for each by `torchrun "
            f"--nproc_per_node {num_devices} scripts/train.py ...` or `accelerate launch scripts/train.py ...`, or train on one: "
            "`CUDA_VISIBLE_DEVICES=0`."
        )


def leave_processes() -> None:
    """Takes this process out of the group of those that train together, if there is one: the last thing that it does.

    Nothing that trained may be in reach any more. A trainer and its model keep the group and its threads, which let go of what
    they have added up when they come to it. A thread needs the interpreter for that: torch aborts a process that ends
    meanwhile, and the launcher ends the other processes then, whatever they are writing.
    """
    if distributed.is_available() and distributed.is_initialized():
        # Trainer and model refer to each other.
        gc.collect()
        distributed.destroy_process_group()


def get_random_states() -> tuple:
    """The states of the process-wide generators, for `set_random_states`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_random_states(states: tuple) -> None:
    """Puts the process-wide generators into states that were taken or made."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def make_random_states(seed: int, epoch: int) -> tuple:
    """States that seed and epoch determine; the generators of the process stay as they are."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(3).tolist()
    return (
        random.Random(words[0]).getstate(),
        np.random.RandomState(words[1]).get_state(),
        torch.Generator().manual_seed(words[2]).get_state(),
    )


def are_equal_states(first: tuple, second: tuple) -> bool:
    """Whether the next numbers drawn from both would be the same."""
    is_numpy_equal = first[1][2] == second[1][2] and np.array_equal(first[1][1], second[1][1])
    return is_numpy_equal and first[0] == second[0] and torch.equal(first[2], second[2])


@contextlib.contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, afterwards all states are as before, that of a device too."""
    states = get_random_states()
    is_forked = device.type not in ("cpu", "mps")
    devices, device_type = ([device], device.type) if is_forked else ([], "cuda")
    try:
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        set_random_states(states)


class RepeatedPairsMixin:
    """For a trainer, before its parents: a pair that fills a batch up has its labels ignored, and counts nowhere.

    accelerate takes the first pairs for that. The last step of an epoch is the one that a single process would make. Batches by
    a budget of tokens have fillers of their own.
    """

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._repeats_pairs:
            epoch_iterator = self._each_pair_once(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @property
    def _repeats_pairs(self) -> bool:
        """Whether the last batches of an epoch of training may hold pairs again."""
        accelerator = self.accelerator
        return (
            share_out_pairs(self.args, accelerator)
            and self.max_tokens_per_batch is None
            and hasattr(self.train_dataset, "__len__")
            and not self.args.dataloader_drop_last
            and accelerator.even_batches
            and not accelerator.dispatch_batches
            # A loss of one's own need not be a number where there is no label at all.
            and not self._has_own_loss
        )

    def _each_pair_once(self, batches: Iterable[Mapping]) -> Iterator[Mapping]:
        for batch in batches:
            labels = batch.get("labels")
            # Packed pairs have no rows.
            if (
                self.accelerator.gradient_state.end_of_dataloader
                and labels is not None
                and "target_lengths" not in batch
            ):
                # A loader that skips batches does not know it.
                remainder = len(self.train_dataset) % (len(labels) * self.args.world_size)
                batch = {**batch, "labels": self._own_labels(labels, remainder)}
            yield batch

    def _own_labels(self, labels: torch.Tensor, remainder: int) -> torch.Tensor:
        """Labels `(batch, target)` of a last batch, those of repeated pairs ignored.

        Args:
            labels: Of this process.
            remainder: So many pairs of the last batches, of all processes in order, are no repeats; 0 or less means all.
        """
        if remainder <= 0:
            return labels
        own = max(0, remainder - self.args.process_index * len(labels))
        return torch.cat([labels[:own], torch.full_like(labels[own:], IGNORED_LABEL)])
