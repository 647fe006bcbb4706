"""One process, one device, the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..config.load import resolve_batch
from ..config.schema import RunConfig
from ..errors import ConfigError
from ..parallel.precision import autocast_forward, loss_scaler
from ..parallel.weights import Weights
from ..parallel.world import World
from .base import Facts, OptimizerFactory, StepRequest, Update
from .states import TorchStates
from .step import clip_and_step


class Single(TorchStates):
    name = "single"
    facts = Facts(hooks_model=False)
    model: nn.Module

    def __init__(self, config: RunConfig, world: World) -> None:
        accum = resolve_batch(config, world.size)
        if config.optim.in_backward and accum > 1:
            raise ConfigError(
                f"optim.in_backward=true updates in every backward, but a step has {accum} micro-batches",
                f"set train.micro_batch_size={config.train.global_batch_size}, or remove optim.in_backward",
            )
        self._config = config
        self._world = world
        self._scaler = loss_scaler(config.precision, world.device)
        self._squared_norms: list[torch.Tensor] = []

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        weights.materialise(model, self._world.device)
        autocast_forward(model, self._world.device, self._config.precision)
        self.model = self._bare = model
        self.optimizer = make_optimizer(model)
        self._parameters = list(model.parameters())
        if self._config.optim.in_backward:
            self._update_in_backward(model)

    def _update_in_backward(self, model: nn.Module) -> None:
        """Hook every parameter: update it as soon as its gradient is complete, then drop the gradient."""
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}

        def update(param: torch.Tensor) -> None:
            assert param.grad is not None
            self._squared_norms.append(param.grad.float().square().sum())
            all_groups = self.optimizer.param_groups
            self.optimizer.param_groups = [{**groups[param], "params": [param]}]
            self.optimizer.step()
            self.optimizer.param_groups = all_groups
            param.grad = None

        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, request: StepRequest) -> Update:
        if self._config.optim.in_backward:
            norm = torch.stack(self._squared_norms).sum().sqrt()
            self._squared_norms.clear()
            return Update(norm, updated=True)
        return clip_and_step(self._parameters, self.optimizer, self._scaler, request)
