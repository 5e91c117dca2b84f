"""Random numbers of several processes: those of dropout are each process's own, those of the order of pairs are shared."""

import random

import numpy as np
import torch

from metaphrase.training.processes import share_out_pairs
from metaphrase.training.random_states import get_random_states, set_random_states


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
