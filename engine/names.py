"""Which names are which: a model's tensors in memory, and in its folder.

transformers fuses experts, renames heads and the like while it loads a folder, and undoes that when
it saves one. What leaves a process carries the names and shapes of the folder, which every other
library expects; both ways are transformers' own code, so nothing here knows a family.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict


class WeightsMismatchError(ValueError):
    """Weights that a model can't take as they are. The message names tensors."""


def in_folder(model: Any) -> dict[str, Tensor]:
    """A model's tensors as its folder has them, tied ones once. Views, unless converted."""
    return _in_folder(model, model.state_dict())


@torch.no_grad()
def fill(model: Any, named: Mapping[str, Tensor]) -> None:
    """Copies tensors that are named and shaped as in the folder into a model, whose parameters stay
    the objects that they are. Raises WeightsMismatchError before it writes anything if a tensor is
    missing, unknown or of another shape."""
    own = model.state_dict()
    places = _in_folder(model, own)
    check(_signature(named), _signature(places))
    if {id(tensor) for tensor in places.values()} <= {id(tensor) for tensor in own.values()}:
        for name, place in places.items():
            place.copy_(named[name])
    else:
        values = _loaded(model, named)
        for name, place in own.items():
            place.copy_(values[name])


def check(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses weights whose names and shapes aren't the expected ones."""
    wrong = sorted(given.items() ^ expected.items())
    if wrong:
        names = ", ".join(dict.fromkeys(name for name, _ in wrong[:8]))
        raise WeightsMismatchError(
            f"weights don't fit the model: {len(given)} tensors given, {len(expected)} expected; "
            f"missing, unknown or of another shape: {names}"
        )


def _in_folder(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `save_pretrained` does it."""
    ignored = set(model._keys_to_ignore_on_save or ())
    saved = {name: tensor for name, tensor in state.items() if name not in ignored}
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(saved, model)))


def _signature(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def _loaded(model: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `from_pretrained` makes of a folder with these tensors, by names in memory."""
    other, report = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=dict(named),
        dtype=model.dtype,
        output_loading_info=True,
    )
    if wrong := {kind: found for kind, found in report.items() if found}:
        raise WeightsMismatchError(
            f"{type(model).__name__} can't load weights it has saved: {wrong}"
        )
    return dict(other.state_dict())
