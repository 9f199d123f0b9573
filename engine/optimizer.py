"""AdamW for everything, or Muon for the hidden layers' matrices and AdamW for the rest."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engine.config import OptimizerConfig

# Quintic iteration towards U V^T, tuned for steepness at 0 (Jordan et al. 2024, "Muon").
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
BETAS = (0.9, 0.98)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: every direction of a matrix moves at the same speed.

    torch has a Muon of its own since 2.9; its iteration is fixed to bfloat16, which a CPU without
    bfloat16 units does about 17 times slower than float32. This one iterates in the parameter's
    type, and all matrices of one shape at once."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = orthogonalise(torch.stack([self._momentum(p) for p in parameters]))
                lr = group["lr"] * math.sqrt(max(1.0, shape[-2] / shape[-1]))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-lr)

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Nesterov's look-ahead at the running mean of gradients."""
        gradient = parameter.grad
        assert gradient is not None  # `step` passes no other
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[..., rows, columns] → the same with all singular values near 1, by five steps of
    Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """The optimizers of a model under one schedule."""

    def __init__(self, model: Any, config: OptimizerConfig, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        matrices = _hidden_matrices(model) if config.type == "muon" else set()
        rest = [p for p in model.parameters() if p not in matrices]
        decayed = [p for p in rest if p.ndim >= 2]
        plain = [p for p in rest if p.ndim < 2]  # norms and biases
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.lr, betas=BETAS)
        ]
        self._peaks = [config.lr]
        if matrices:
            ordered = [p for p in model.parameters() if p in matrices]
            self._optimizers.append(Muon(ordered, config.matrix_lr, config.weight_decay))
            self._peaks.append(config.matrix_lr)

    def schedule(self, version: int) -> float:
        """Sets the learning rates of the step that makes `version` + 1; returns AdamW's."""
        factor = self._factor(version)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        return self._peaks[0] * factor

    def _factor(self, version: int) -> float:
        warmup, final = self._config.warmup_steps, self._config.final_fraction
        if version < warmup:
            return (version + 1) / (warmup + 1)
        progress = (version - warmup) / max(1, self._steps - 1 - warmup)
        return 1 - (1 - final) * min(1.0, progress)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """All state as flat tensors, `<parameter>:<name>`."""
        return {
            f"{self._names[parameter]}:{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    prefix = f"{self._names[parameter]}:"
                    own = {k: v for k, v in tensors.items() if k.startswith(prefix)}
                    for name, value in own.items():
                        place = "cpu" if value.ndim == 0 else parameter.device
                        key = name.removeprefix(prefix)
                        optimizer.state[parameter][key] = value.clone().to(place)


def _hidden_matrices(model: Any) -> set[Tensor]:
    """Matrices of the hidden layers, experts' in stacks: neither embeddings nor the head."""
    outer = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    return {p for p in model.parameters() if p.ndim >= 2 and id(p) not in outer}
