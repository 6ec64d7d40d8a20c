"""The tensors of a run, by name, and the plain values around them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import Session, TensorSlice
from tp_core.errors import StateError

from tp_trainer._checkpoint._whole import fill_from_whole, infos_of_whole, read_whole

__all__ = ["collect", "optimizer_values", "restore"]

Tensors = dict[str, Tensor | TensorSlice]

_MODEL = "model."
_OPTIMIZER = "optimizer."


def collect(session: Session, model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Return the tensors of a prepared model and its optimizer: no copies.

    Raises:
        StateError: The model's state has something that is no tensor.
    """
    tensors = {
        f"{_MODEL}{name}": session.as_slice(tensor, tensor.detach())
        for name, tensor in _model_tensors(session, model).items()
    }
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}.{key}"] = _like(session, parameter, value.detach())
    return tensors


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer's state has besides tensors: its groups' numbers among them."""
    state = optimizer.state_dict()
    return {
        "groups": [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in state["param_groups"]
        ],
        "state": {
            str(index): {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            for index, entries in state["state"].items()
        },
    }


def restore(
    session: Session, model: nn.Module, optimizer: Optimizer, values: Mapping[str, Any], path: Path
) -> None:
    """Load model and optimizer from what :func:`collect` gave and was written to ``path``.

    Args:
        session: Where they are.
        model: The prepared model.
        optimizer: The prepared optimizer.
        values: What :func:`optimizer_values` returned.
        path: A file of `write_whole`, or a folder of `tp_core.write_tensors`.

    Raises:
        StateError: Names or shapes do not fit; model and optimizer are untouched.
    """
    if path.is_file():
        stored = read_whole(path)
        infos, fill = infos_of_whole(stored), partial(fill_from_whole, stored=stored, path=path)
    else:
        from tp_core import read_tensors, tensor_infos  # importing what they need takes half a second

        infos, fill = tensor_infos(path), partial(read_tensors, folder=path)
    current = _model_tensors(session, model)
    loaded = {
        name: torch.empty_like(
            tensor, device="cpu", requires_grad=False, memory_format=torch.contiguous_format
        )
        for name, tensor in current.items()
    }
    surplus = [n for n in infos if n.startswith(_MODEL) and n.removeprefix(_MODEL) not in current]
    if surplus:
        msg = f"{path} has {surplus[0].removeprefix(_MODEL)!r}, which the model lacks"
        raise StateError(msg)
    targets: Tensors = {
        f"{_MODEL}{name}": session.as_slice(current[name], tensor) for name, tensor in loaded.items()
    }
    parameters = _parameters(optimizer)
    state: dict[int, dict[str, Any]] = {int(i): dict(entries) for i, entries in values["state"].items()}
    for name, info in infos.items():
        if not name.startswith(_OPTIMIZER):
            continue
        text, key = name.removeprefix(_OPTIMIZER).split(".", 1)
        index = int(text)
        if index >= len(parameters):
            msg = f"{path} has state of parameter {index}, and the optimizer has {len(parameters)} of them"
            raise StateError(msg)
        parameter = parameters[index]
        whole = _like(session, parameter, parameter)
        shape = whole.shape if isinstance(whole, TensorSlice) else tuple(parameter.shape)
        value = torch.empty(parameter.shape if info.shape == tuple(shape) else info.shape, dtype=info.dtype)
        targets[name] = _like(session, parameter, value)
        state.setdefault(index, {})[key] = value
    groups = _merged_groups(optimizer, values["groups"], path)
    fill(targets)
    with torch.no_grad():
        for name, tensor in loaded.items():
            current[name].copy_(tensor)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _merged_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], path: Path
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the numbers that were saved.

    Raises:
        StateError: They are those of another kind of optimizer, or as many as this one has not.
    """
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    if len(groups) != len(saved):
        msg = f"{path} has {len(saved)} parameter groups, and the optimizer {len(groups)}"
        raise StateError(msg)
    pairs = list(zip(groups, saved, strict=True))
    # A scheduler has added that one; other versions of torch may lack some that this one has.
    foreign = sorted({key for group, old in pairs for key in old.keys() - group.keys() - {"initial_lr"}})
    if foreign:
        msg = (
            f"{path} is of another kind of optimizer: it has {', '.join(map(repr, foreign))}, which "
            f"{type(optimizer).__name__} lacks; resume with the one that the run had"
        )
        raise StateError(msg)
    return [group | {k: _like_old(group.get(k), value) for k, value in old.items()} for group, old in pairs]


def _model_tensors(session: Session, model: nn.Module) -> dict[str, Tensor]:
    state = session.unwrap(model).state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = (
                f"the model's state has {name!r}, a {type(value).__name__}; a checkpoint holds "
                "tensors: let get_extra_state() return one"
            )
            raise StateError(msg)
    return dict(state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _like(session: Session, parameter: Tensor, value: Tensor) -> Tensor | TensorSlice:
    """Cut the optimizer's value as its parameter is cut, if it has its shape."""
    return session.as_slice(parameter, value) if value.shape == parameter.shape else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _like_old(old: Any, value: Any) -> Any:
    """Give a number of a group the type it has in the optimizer, where that is a tensor."""
    return torch.full_like(old, value) if isinstance(old, Tensor) else value
