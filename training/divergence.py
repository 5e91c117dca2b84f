"""Trainer mixin that ends a training whose loss, gradients or weights are no finite numbers."""

from typing import NoReturn

import torch

from metaphrase.storage.weight_files import is_finite
from metaphrase.training.checkpointing.folders import checkpoints_in

# Updates in a row. With float16, an update that overflows is skipped and halves the scale of the loss, which may be 2 ** 24.
_MOST_UPDATES, _MOST_UPDATES_IN_FLOAT16 = 2, 30


class FiniteTraining:
    """Training that ends with an error when it diverges, for any transformers Trainer; the class stands before it in the bases.

    - Training ends at the third update in a row whose loss or gradients are not finite. `logging_nan_inf_filter` may hide them.
    - No checkpoint is saved, and no training ends, with weights that are not finite. So the last checkpoint stays usable.

    Updates are counted on their device. A CPU reads the count after each update; other devices, which it would make wait, and
    several processes only before they log, evaluate or save.
    """

    _counted_step = -1
    _has_finite_losses: torch.Tensor | bool = True
    # In a row, up to now.
    _num_not_finite: torch.Tensor | int = 0

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._has_finite_losses = loss.isfinite() & self._has_finite_losses
        return loss

    # transformers 5.24.0: passes the gradient norm here alone.
    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, **kwargs):
        # There is one more report at the end of an epoch.
        if self.state.global_step != self._counted_step:
            self._counted_step = self.state.global_step
            self._count(grad_norm)
        control, is_alone = self.control, self.args.world_size == 1
        is_waiting = control.should_log or control.should_evaluate or control.should_save
        if is_waiting or (is_alone and self.args.device.type == "cpu"):
            self._check_updates()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _count(self, grad_norm: torch.Tensor | float | None) -> None:
        # With sharded weights, the norm has a part on each device.
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        norm = torch.as_tensor(0.0 if norm is None else norm)
        is_finite_update = norm.isfinite().to(self.args.device) & self._has_finite_losses
        self._num_not_finite = (self._num_not_finite + 1) * ~is_finite_update
        self._has_finite_losses = True

    def _check_updates(self) -> None:
        number = torch.as_tensor(self._num_not_finite, device=self.args.device).reshape(1)
        number = int(self.accelerator.gather(number).max())
        if number > (_MOST_UPDATES_IN_FLOAT16 if self.args.fp16 else _MOST_UPDATES):
            first = self.state.global_step - number + 1
            self._refuse(f"The loss and the gradients must be finite, got NaN or infinity since update {first}")

    def _check_weights(self) -> None:
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        num_not_finite = torch.tensor([sum(not is_finite(weight) for weight in trained)], device=self.args.device)
        if self.accelerator.gather(num_not_finite).any():
            self._refuse(f"The weights must be finite, got NaN or infinity after update {self.state.global_step}")

    def _refuse(self, problem: str) -> NoReturn:
        arguments, rate, saved = self.args, self.args.learning_rate, checkpoints_in(self._get_output_dir(None))
        other = ", or `bf16` in place of `fp16`" if arguments.fp16 else ""
        checkpoint = f" {saved[-1]} holds the last weights that were saved, which are finite." if saved else ""
        raise ValueError(
            f"{problem} of {self.state.max_steps}. Start a new run with a lower `learning_rate`, got {rate:g}, "
            f"more `warmup_steps`, got {arguments.warmup_steps:g}, or a `max_grad_norm` of 1{other}.{checkpoint}"
        )

    def _save_checkpoint(self, model, trial):
        self._check_weights()
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, *args, **kwargs):
        self._check_weights()
        return super()._finalize_training(*args, **kwargs)
