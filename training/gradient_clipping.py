"""Gradient clipping that leaves gradients alone where it would multiply them by 1."""

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

# Where each process holds all of the gradients.
_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU)


class GradientClippingMixin:
    """A `Trainer` that clips on a CPU as torch does, but for a pass over all gradients in the steps that need none.

    Source: clipping by the norm of all gradients is from Pascanu et al. 2013, section 3.2, arXiv 1211.5063.
    """

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        is_whole = self.accelerator.distributed_type in _WHOLE and all(
            type(parameter.grad) is torch.Tensor for parameter in parameters
        )
        if self.args.device.type != "cpu" or not is_whole:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        norm, limit = get_total_norm([parameter.grad for parameter in parameters]), self.args.max_grad_norm
        # torch's factor, which it takes no more than 1 of. If it is not a number, the gradients shall show it.
        if not limit / (norm + 1e-6) >= 1:
            clip_grads_with_norm_(parameters, limit, norm)
        return norm
