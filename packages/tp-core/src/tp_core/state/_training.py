"""A model's and its optimizer's state as named tensors: what a checkpoint of a trainer and of tp-shard holds.

::

    model.<name>                  an entry of the model's state, under its plain name
    optimizer.<name>.<key>        what the optimizer keeps of a parameter
    optimizer.values              JSON, as bytes: the version of this format, and what is not a tensor
    optimizers.<which>.<name>.<key>, optimizers.<which>.values       the same, where there are several

The same names stand for the same tensors however they are split, so that any number of ranks reads the
state of another number. State belongs to a parameter by its name, and not by the order of parameters.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core.errors import StateError
from tp_core.modules._parameters import (
    SHARDED_ATTRIBUTE,
    TensorSlice,
    fill_from_whole,
    is_dtensor,
    is_sharded,
    plain_name,
    plain_state,
    quantized_parts,
    with_own_names,
)
from tp_core.state._files import Cut, SliceBuffer, is_cut, slice_of
from tp_core.state._optimizers import (
    OptimizerValues,
    check_fits,
    named_state,
    numbered_state,
    parameters_as_saved,
    steps_whole,
)
from tp_core.state._plain import Get, StoredTensor, from_json, joined, refs_in, split, to_json
from tp_core.tensors._stored import StoredTensors, TensorInfo

FORMAT = 1

_MODEL = "model."
_OPTIMIZER = "optimizer."
_OPTIMIZERS = "optimizers."
_VALUES = "values"

Optimizers = Optimizer | Mapping[str, Optimizer] | None


def collect_state(
    model: nn.Module, optimizer: Optimizers, *, cut: Cut, without: Collection[str] = ()
) -> dict[str, Tensor | TensorSlice]:
    """Return the state of a model, and of an optimizer over it, as named tensors: no copies.

    Args:
        model: The user's own module.
        optimizer: An optimizer over its parameters, several by name, or ``None``.
        cut: ``cut(parameter, value)`` returns a value of the parameter's shape with its place in the whole,
            as ``Session.as_slice`` does; DTensors know their own place.
        without: Entries of the model's state that are left out, by their plain names.

    Raises:
        ConfigError: The optimizer's state cannot be saved.
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The state has something that is neither a tensor nor a plain value; or an entry of a split
            parameter of which it is not known how it would be split; or a weight is quantized.
    """
    tensors: dict[str, Tensor | TensorSlice] = {}
    for name, tensor in plain_state(_model_tensors(model)).items():
        if name in without:
            continue
        if quantized_parts(tensor) is not None:
            msg = (
                f"the model's {name!r} is quantized ({type(tensor).__name__}), and a checkpoint holds plain "
                "tensors: Checkpoints(weights='trainable') leaves frozen weights out"
            )
            raise StateError(msg)
        tensors[f"{_MODEL}{name}"] = slice_of(cut, tensor, tensor.detach())
    for prefix, member in _by_prefix(optimizer).items():
        _collect_optimizer(model, member, prefix, tensors, cut=cut)
    return tensors


def _collect_optimizer(
    model: nn.Module, optimizer: Optimizer, prefix: str, tensors: dict[str, Tensor | TensorSlice], *, cut: Cut
) -> None:
    is_whole = steps_whole(optimizer)
    quantized: dict[str, bool] = {}

    def put(name: str, value: Tensor, parameter: Tensor | None) -> StoredTensor:
        name = f"{prefix}{name}"
        while name in tensors or name == f"{prefix}{_VALUES}":
            name += "_"
        if (signed := _sign_of_quantized(name.removeprefix(prefix), value)) is not None:
            quantized[name] = signed
            value = _on_local(value, lambda local: local.dequantize())
        like = parameter is not None and value.shape == parameter.shape
        if is_whole and parameter is not None and is_cut(cut, parameter):
            like = is_sharded(value)  # by its shape alone, what is whole could look like a shard
        if parameter is not None and like:
            tensors[name] = slice_of(cut, parameter, value.detach())
        else:
            splits = parameter is not None and value.numel() > 1 and is_cut(cut, parameter) and not is_whole
            if splits or is_dtensor(value):
                if parameter is None:
                    shapes = ""
                else:
                    shapes = f", of which this rank has {tuple(parameter.shape)}"
                msg = (
                    f"the optimizer keeps {name.removeprefix(prefix)} of shape {tuple(value.shape)} of a "
                    f"split parameter{shapes}: how it would be cut is not known"
                )
                raise StateError(msg)
            tensors[name] = value.detach()
        return StoredTensor(name, like)

    saved = replace(named_state(model, optimizer, put), quantized=quantized)
    values = {"format": FORMAT} | {field.name: getattr(saved, field.name) for field in fields(saved)}
    text = to_json("the state of the optimizer", values).encode()
    tensors[f"{prefix}{_VALUES}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


# Quantized state, as of torchao's 8-bit optimizers: in a file are its values, which can be cut anywhere.
# Where the blocks of the quantization are others afterwards, it is quantized again.


def _sign_of_quantized(name: str, value: Tensor) -> bool | None:
    """Return whether a quantized tensor has negative values; ``None`` for a plain tensor."""
    local: Tensor = value.to_local() if is_dtensor(value) else value
    if not hasattr(type(local), "__tensor_flatten__"):
        return None
    if "dequantize" not in {n for kind in type(local).__mro__[: -len(Tensor.__mro__)] for n in vars(kind)}:
        msg = (
            f"the optimizer keeps {name} as a {type(local).__name__}, which has no dequantize() that a "
            "checkpoint could save the values of; take another optimizer, or train without checkpoint="
        )
        raise StateError(msg)
    return bool(getattr(local, "signed", True))


def _on_local(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor with a change of what this rank holds of it."""
    if not is_dtensor(value):
        return change(value)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        change(value.to_local()),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


@torch.no_grad()
def _quantized_as(buffer: Tensor, value: Tensor) -> Tensor:
    local: Tensor = buffer.to_local() if is_dtensor(buffer) else buffer
    source = value.to_local() if is_dtensor(value) else value
    local.copy_(source)
    return buffer


def _by_prefix(optimizer: Optimizers) -> dict[str, Optimizer]:
    """Return the optimizers by what their names in a state begin with."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {f"{_OPTIMIZERS}{name}.": one for name, one in optimizer.items()}
    return {_OPTIMIZER: optimizer}


def restore_state(
    model: nn.Module,
    optimizer: Optimizers,
    stored: StoredTensors,
    *,
    cut: Cut,
    same_groups: bool = False,
    without: Collection[str] = (),
) -> None:
    """Load what :func:`collect_state` returned, on this or another number of ranks.

    Names, shapes and settings are looked at before anything is changed. What the model holds is then read
    into its own memory, so that it is there once: whether the files are what was written is to be known
    before (their digests); after an error of the disk the model is to be loaded again.

    Args:
        model: The user's own module.
        optimizer: An optimizer over its parameters, or several by name, to be loaded too; the parameters may
            come in another order.
        stored: Where the state is.
        cut: As in :func:`collect_state`.
        same_groups: Whether the optimizer's parameter groups must be those that were saved, in their order.
        without: Entries of the model's state that were left out, by their plain names; they stay as they are.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: Something is missing, new or has another shape, and is named; or a file is damaged.
    """
    current = plain_state(_model_tensors(model))
    infos = stored.infos
    surplus = next((n for n in infos if n.startswith(_MODEL) and n.removeprefix(_MODEL) not in current), None)
    if surplus is not None:
        msg = f"{stored.path} has {surplus.removeprefix(_MODEL)!r}, which the model lacks"
        raise StateError(msg)
    places = {
        f"{_MODEL}{name}": SliceBuffer(cut, tensor, None)
        for name, tensor in current.items()
        if name not in without
    }
    optimizers = _by_prefix(optimizer)
    saved: dict[str, OptimizerValues] = {}
    for prefix, member in optimizers.items():
        saved[prefix] = values = _optimizer_values(stored, prefix)
        check_fits(model, member, values, stored.path, same_groups=same_groups)
        parameters = parameters_as_saved(model, member, values)
        for name, value in values.state.items():
            for ref in refs_in(value):
                if ref.like_parameter:
                    places[ref.name] = SliceBuffer(cut, parameters[name], infos[ref.name].dtype)
                else:
                    places[ref.name] = _whole_place(infos[ref.name])
        for ref in refs_in([values.others, values.extra]):
            places[ref.name] = _whole_place(infos[ref.name])
    stored.fill({name: place.target for name, place in places.items()})
    tensors = {name: place.take() for name, place in places.items()}
    names = {n: plain_name(n) for n in _model_tensors(model) if plain_name(n) not in without}
    state = {name: tensors[f"{_MODEL}{plain}"] for name, plain in names.items()}
    model.load_state_dict(state, strict=not without)
    lists = [id(member.param_groups) for member in optimizers.values()]
    for prefix, member in optimizers.items():
        _load_optimizer(model, member, saved[prefix], tensors, infos, cut=cut)
    # An optimizer within another (SAM's base_optimizer) has the groups of that one, where schedulers set the
    # learning rate of both. torch's load_state_dict gives each groups of its own.
    owners: dict[int, Optimizer] = {}
    for number, member in zip(lists, optimizers.values(), strict=True):
        member.param_groups = owners.setdefault(number, member).param_groups


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a whole state into a model, which may have DTensors and compiled parts.

    Raises:
        RuntimeError: Names or shapes do not fit the model (torch's own error).
    """
    current = model.state_dict(keep_vars=True)
    own = with_own_names(model, state)
    for name, value in own.items():
        like = current.get(name)
        # A value that is a DTensor too has been cut before.
        if (
            isinstance(like, Tensor)
            and is_dtensor(like)
            and not is_dtensor(value)
            and like.shape == value.shape
        ):
            place = SliceBuffer(_uncut, like, value.dtype)
            fill_from_whole(place.target, value)
            own[name] = place.take()
    model.load_state_dict(own)


def _load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    saved: OptimizerValues,
    tensors: Mapping[str, Tensor],
    infos: Mapping[str, TensorInfo],
    *,
    cut: Cut,
) -> None:
    optimizer.load_state_dict(numbered_state(model, optimizer, saved, lambda ref, _: tensors[ref.name]))
    # torch's own load casts every tensor, also a counter, to its parameter's dtype, and takes text apart.
    for name, parameter in parameters_as_saved(model, optimizer, saved).items():
        entries, kept = saved.state.get(name), optimizer.state.get(parameter)
        before = infos.get(f"{_MODEL}{name}")
        if not isinstance(entries, dict) or not isinstance(kept, dict):
            continue
        same_type = before is not None and before.dtype == parameter.dtype
        for key in entries.keys() & kept.keys():
            entry, now = entries[key], kept[key]
            if not any(refs_in(entry)):
                kept[key] = entry
            elif same_type and isinstance(entry, StoredTensor) and isinstance(now, Tensor):
                if now.dtype != infos[entry.name].dtype:
                    kept[key] = tensors[entry.name].to(now.device)
            elif same_type:
                kept[key] = joined(entry, None, _taken_to(parameter.device, tensors))
            if not isinstance(entry, StoredTensor):
                continue
            # As torchao's optimizers make them; another kind of optimizer takes the values as they are.
            make = getattr(optimizer, "_new_buffer", None)
            if make is not None and entry.name in saved.quantized:
                kept[key] = _quantized_as(make(parameter, saved.quantized[entry.name]), kept[key])
            if entry.like_parameter and is_cut(cut, parameter):
                setattr(kept[key], SHARDED_ATTRIBUTE, True)


def _taken_to(device: torch.device, tensors: Mapping[str, Tensor]) -> Get:
    return lambda ref, _: tensors[ref.name].to(device)


def _optimizer_values(stored: StoredTensors, prefix: str) -> OptimizerValues:
    """Return what was saved of an optimizer besides the tensors of its state."""
    key = f"{prefix}{_VALUES}"
    info = stored.infos.get(key)
    if info is None:
        msg = f"{stored.path} has no state of {_words(prefix)}: it lacks {key}"
        optimizers = sorted({name for name in stored.infos if name.startswith(_OPTIMIZERS)})
        if optimizers:
            names = dict.fromkeys(name.split(".")[1] for name in optimizers)
            msg += f"; it has the state of the optimizers {', '.join(names)}"
        elif any(name.startswith(_OPTIMIZER) for name in stored.infos):
            msg += "; what it has of one was written by another program, or by an earlier version of this one"
        raise StateError(msg)
    text = torch.empty(info.shape, dtype=info.dtype)
    stored.fill({key: text})
    try:
        values = dict(from_json(bytes(text.tolist()).decode()))
        version = values.pop("format")
    except (ValueError, TypeError, KeyError) as error:
        msg = f"{stored.path} is damaged: {key} cannot be read: {error}"
        raise StateError(msg) from error
    if version != FORMAT:
        msg = f"{stored.path} has an optimizer's state in format {version!r}, and this version reads {FORMAT}"
        raise StateError(msg)
    saved = OptimizerValues(**values)
    settings = {ref.name: _whole_place(stored.infos[ref.name]) for ref in refs_in(saved.groups)}
    stored.fill({name: place.target for name, place in settings.items()})
    groups: list[dict[str, Any]] = joined(saved.groups, None, lambda ref, _: settings[ref.name].take())
    return replace(saved, groups=groups)


def _words(prefix: str) -> str:
    if prefix == _OPTIMIZER:
        return "an optimizer"
    return f"the optimizer {prefix.split('.')[1]!r}"


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = (
                f"the model's state has {plain_name(name)!r}, a {type(value).__name__}; a checkpoint holds "
                "tensors: let get_extra_state() return one"
            )
            raise StateError(msg)
    return dict(state)


def _whole_place(info: TensorInfo) -> SliceBuffer:
    return SliceBuffer(_uncut, torch.empty(info.shape), info.dtype)


def _uncut(_parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:
    return value


# -- Nested values of anything that keeps state, with their tensors by name: what a run saves besides models


def collect_values(
    name: str, value: Any, *, own: bool = False, parts: Mapping[int, Tensor | TensorSlice] | None = None
) -> tuple[Any, dict[str, Tensor | TensorSlice]]:
    """Return a nested value as a plain one, and the tensors in it by the names that stand for them.

    Of a DTensor over all ranks it is this rank's slice; of one over some of them what this rank holds, as a
    tensor of its own.

    Args:
        name: What all of the tensors' names begin with.
        value: Tensors and plain values, in lists, tuples and dicts.
        own: Whether it is this rank's own state: what it holds of DTensors, too.
        parts: Tensors of it with their places in the whole, by their ids.

    Raises:
        StateError: ``value`` has something else in it.
    """
    tensors: dict[str, Tensor | TensorSlice] = {}

    def put(wanted: str, tensor: Tensor, _: Tensor | None) -> StoredTensor:
        while wanted in tensors:
            wanted += "_"
        part = (parts or {}).get(id(tensor))
        if part is None:
            tensors[wanted] = _held(tensor.detach(), own=own)
        else:
            tensors[wanted] = part
        return StoredTensor(wanted, like_parameter=False, is_on_accelerator=tensor.device.type != "cpu")

    plain = split(value, name, None, put)
    to_json(
        f"the state {name.removeprefix('state.')!r}", plain
    )  # which says what cannot be saved, before anything is written
    return plain, tensors


def _held(tensor: Tensor, *, own: bool) -> Tensor | TensorSlice:
    if not is_dtensor(tensor):
        return tensor
    if own or tensor.device_mesh.size() < dist.get_world_size():
        local: Tensor = tensor.to_local()
        return local
    return slice_of(lambda _, part: part, tensor, tensor)


def restore_values(value: Any, stored: StoredTensors, device: torch.device | None = None) -> Any:
    """Return what :func:`collect_values` was given, with its tensors on the CPU.

    Args:
        value: What :func:`collect_values` returned.
        stored: The tensors.
        device: Where tensors go that were on an accelerator, whichever it was.

    Raises:
        StateError: A tensor is missing, or a file is damaged.
    """
    infos: Mapping[str, Any] = stored.infos
    names = [ref.name for ref in refs_in(value)]
    missing = next((name for name in names if name not in infos), None)
    if missing is not None:
        msg = f"{stored.path} is damaged: it lacks {missing!r}"
        raise StateError(msg)
    tensors = {name: torch.empty(infos[name].shape, dtype=infos[name].dtype) for name in names}
    stored.fill(tensors)

    def get(ref: StoredTensor, _: Tensor | None) -> Tensor:
        tensor = tensors[ref.name]
        if device is None or not ref.is_on_accelerator:
            return tensor
        return tensor.to(device)

    return joined(value, None, get)
