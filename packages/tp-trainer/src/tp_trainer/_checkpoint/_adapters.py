"""Adapters of Hugging Face's peft in files: in peft's own format, and merged into the weights.

peft is never imported here: a model with its adapters has imported it.
"""

import copy
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, StateError
from tp_core.files import atomic_part
from tp_core.plugins import Session
from tp_core.sessions import agree_on_failure
from tp_core.state import SafetensorsFiles, SliceBuffer, plain_name, whole
from tp_core.tensors import quantized_parts

from tp_trainer._checkpoint._model_files import write_state

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_COMPARED = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""The settings in a configuration by which equal weights compute something else."""


def is_adapter(path: Path) -> bool:
    """Return whether a path is an adapter that peft or :func:`export_adapters` wrote."""
    return path.name == WEIGHTS or (path / CONFIG).is_file()


def _find_adapted(model: nn.Module, what: str) -> tuple[str, Any]:
    """Return the only ``PeftModel`` in a model, after the prefix of its names there."""
    peft = sys.modules.get("peft")
    models: list[tuple[str, Any]] = []
    if peft is not None:
        models = [(name, m) for name, m in model.named_modules() if isinstance(m, peft.PeftModel)]
    if len(models) != 1:
        has = len(models) or "none"
        msg = (
            f"{what} needs one model with adapters, a PeftModel of peft, and {type(model).__name__} has {has}"
        )
        raise ConfigError(msg)
    name, adapted = models[0]
    prefix = f"{name}." if name else ""
    return plain_name(prefix), adapted


# -- peft's own format -----------------------------------------------------------------------------


def export_adapters(session: Session, model: nn.Module, folder: Path) -> None:
    """Write the adapters of a prepared model, as ``PeftModel.save_pretrained`` does; call it on every rank.

    The adapter "default" is written into the folder, others into folders of their names in it.

    Raises:
        ConfigError: The model has no adapters; or an adapter is not in its state; or another process writes
            there; on every rank.
        OSError: A file cannot be written; on every rank.

    Collectives: for each adapter a broadcast, two all-gathers of objects, and the backend's gathering of its
    tensors.
    """
    start, adapted = _find_adapted(session.unwrap(model), "export(adapter=True)")
    parts = session.state_parts(model)
    inside = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
    for adapter in adapted.peft_config:
        place = folder if adapter == "default" else folder / adapter
        # On rank 0 alone: peft may ask the base's configuration about the size of its vocabulary.
        failure: ConfigError | OSError | None = None
        names: dict[str, str] = {}
        if session.is_main:
            try:
                place.mkdir(parents=True, exist_ok=True)
                names = _names_in_file(adapted, adapter, inside, with_embeddings="auto")
            except (ConfigError, OSError) as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the other ranks wait to learn of it
                failure = ConfigError(f"peft cannot write the adapter {adapter!r}: {error}")
        agree_on_failure(failure, session.gather_objects, f"write {place}")
        names = session.broadcast(names, where="names of adapters")
        write = partial(_write_config, adapted, adapter, place)
        write_state(session, {n: inside[own] for n, own in names.items()}, place / WEIGHTS, then=write)


def _names_in_file(
    adapted: Any, adapter: str, state: Mapping[str, Tensor], *, with_embeddings: bool | str
) -> dict[str, str]:
    """Return the names of an adapter's tensors in the model's state, by their names in peft's file."""
    peft = sys.modules["peft"]
    in_file = peft.get_peft_model_state_dict(
        adapted, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=with_embeddings
    )
    names = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    for name, tensor in in_file.items():
        if id(tensor) not in names:
            kind = adapted.peft_config[adapter].peft_type
            msg = (
                f"the adapter {adapter!r} ({getattr(kind, 'value', kind)}) is not in the model's state as "
                f"peft writes it ({name!r}); write it with the model's own save_pretrained(), on a backend "
                "that splits no weights"
            )
            raise ConfigError(msg)
    return {name: names[id(tensor)] for name, tensor in in_file.items()}


def _write_config(adapted: Any, adapter: str, place: Path) -> None:
    """Write the configuration of an adapter, with what ``PeftModel.save_pretrained`` adds to it."""
    config = copy.copy(adapted.peft_config[adapter])
    config.inference_mode = True  # as peft writes it: who loads it trains it only if asked to
    base = adapted.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    mapping = None
    if config.task_type is None:
        kind = _plain_class(type(base))
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with TemporaryDirectory() as scratch:
        try:
            config.save_pretrained(scratch, auto_mapping_dict=mapping)
        except (TypeError, ValueError) as error:  # of JSON
            msg = f"the configuration of the adapter {adapter!r} cannot be written: {error}"
            raise ConfigError(msg) from error
        text = Path(scratch, CONFIG).read_text()
    with atomic_part(place / CONFIG) as part:
        part.write_text(text)


def load_adapter(session: Session, model: nn.Module, path: Path, *, name: str | None) -> None:
    """Load an adapter in peft's format into the one that a prepared model has; call it on every rank.

    Raises:
        StateError: The adapter is of another model, or of another rank; the model is unchanged.
    """
    folder = path.parent if path.name == WEIGHTS else path
    _, adapted = _find_adapted(session.unwrap(model), f"load_model() of the adapter {path}")
    adapter = adapted.active_adapter if name is None else name
    if adapter not in adapted.peft_config:
        msg = f"the model has no adapter {adapter!r}; it has {', '.join(adapted.peft_config)}"
        raise ConfigError(msg)
    _check_settings(folder, adapted, adapter)
    state = {plain_name(n): t for n, t in adapted.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    names = _names_in_file(adapted, adapter, state, with_embeddings=False)
    stored = SafetensorsFiles(folder / WEIGHTS)
    names |= {
        n: n for n in stored.infos if n not in names and n in state
    }  # embeddings, under their own names
    places = {n: SliceBuffer(session.as_slice, state[own], None) for n, own in names.items()}
    shapes = {n: tuple(place.target.shape) for n, place in places.items()}
    problems = [f"lacks {n}" for n in shapes if n not in stored.infos]
    problems += [f"has {n}, which the model's lacks" for n in stored.infos if n not in shapes]
    problems += [
        f"has {n} of shape {info.shape}, not {shapes[n]}"
        for n, info in stored.infos.items()
        if shapes.get(n, info.shape) != info.shape
    ]
    if problems:
        msg = f"the adapter {folder} does not fit the model's {adapter!r}: it {'; it '.join(problems[:3])}"
        raise StateError(msg)
    stored.fill({n: place.target for n, place in places.items()})


def _check_settings(folder: Path, adapted: Any, adapter: str) -> None:
    """Make sure that an adapter computes with its weights what the model's adapter would."""
    try:
        stored = json.loads((folder / CONFIG).read_text())
        own = adapted.peft_config[adapter].to_dict()
        pairs = [(key, stored[key], own.get(key)) for key in _COMPARED if key in stored]
    except (ValueError, TypeError) as error:
        msg = f"{folder / CONFIG} is damaged: {error}"
        raise StateError(msg) from error
    for key, theirs, own_value in pairs:
        ours = getattr(own_value, "value", own_value)  # of an enumeration
        if theirs != ours:
            msg = (
                f"the adapter {folder} does not fit the model's {adapter!r}: it has {key}={theirs!r}, and "
                f"the model's has {key}={ours!r}; make the model's adapter with "
                "PeftModel.from_pretrained(base, folder, is_trainable=True)"
            )
            raise StateError(msg)


# -- Weights with the adapters merged into them ----------------------------------------------------


def export_merged(session: Session, model: nn.Module, path: Path, *, max_file_nbytes: int | None) -> None:
    """Write a model's weights without adapters: those that are active are merged, as peft merges them.

    The names are the model's before peft. One adapted layer at a time is whole in memory.

    Raises:
        ConfigError: The model has no adapters, or ones that are in no weight; or a weight is quantized; on
            every rank. Or as in `export_model`.
        OSError: A file cannot be written; on every rank.
        StateError: peft cannot merge an adapter; on every rank.

    Collectives: the backend's gathering of each tensor, one all-gather of objects.
    """
    plain = session.unwrap(model)
    start, adapted = _find_adapted(plain, "export(merged=True)")
    base = adapted.get_base_model()
    inner = next((n for n, m in adapted.named_modules() if m is base), "")
    if adapted.active_peft_config.is_prompt_learning:
        msg = (
            "export(merged=True) merges adapters into weights, and this one "
            f"({adapted.peft_type}) is none of a weight; write it with export(adapter=True)"
        )
        raise ConfigError(msg)
    parts = session.state_parts(model)
    layers = _adapted_layers(plain)
    infos: dict[str, Tensor] = {}
    origins: dict[str, tuple[str, str] | None] = {}  # the adapted layer and the name within its base
    for name, part in parts.items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        within = name if owner is None else _within_base(layers[owner], name.removeprefix(f"{owner}."))
        if within is None:
            continue
        _check_floating(name, part, is_merged=owner is not None)
        out = name if owner is None else f"{owner}.{within}"
        if out.startswith(start):
            out = start + out.removeprefix(f"{start}{plain_name(inner)}.")
        infos[out] = part
        origins[out] = None if owner is None else (owner, within)
    last: dict[str, dict[str, Tensor]] = {}  # the layer that was merged last

    def read(out: str) -> Tensor:
        origin = origins[out]
        if origin is None:
            return whole(infos[out])
        owner, within = origin
        if owner not in last:
            last.clear()
            tensors = {n: whole(p) for n, p in parts.items() if n.startswith(f"{owner}.")}
            # On all ranks: an error of peft then ends all of them, and not rank 0 while the others gather.
            last[owner] = _merged(layers[owner], owner, tensors)
        return last[owner][within]

    write_state(session, infos, path, read=read, max_file_nbytes=max_file_nbytes)


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the outermost modules that peft has put in the place of others, by their plain names."""
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        path = plain_name(name)
        is_one = hasattr(module, "base_layer") or hasattr(module, "unload_and_optionally_merge_module")
        if is_one and not any(path.startswith(f"{outer}.") for outer in layers):
            layers[path] = module
    return layers


def _replaced(layer: Any) -> nn.Module:
    """Return the module inside an adapted layer that has the weights after merging."""
    if hasattr(layer, "modules_to_save"):
        own: nn.Module = (
            layer.modules_to_save[layer.active_adapter] if layer.active_adapters else layer.original_module
        )
        return own
    base: nn.Module = (
        layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.token_adapter.get_base_layer()
    )
    return base


def _within_base(layer: nn.Module, name: str) -> str | None:
    """Return the name within the base of an adapted layer; ``None`` for a tensor of an adapter."""
    base = _replaced(layer)
    start = next(plain_name(n) for n, module in layer.named_modules() if module is base)
    if name.startswith(f"{start}."):
        return name.removeprefix(f"{start}.")
    return None


def _check_floating(name: str, part: Tensor, *, is_merged: bool) -> None:
    """Make sure that a weight can take the sum with an adapter's."""
    if quantized_parts(part) is not None or (is_merged and not part.is_floating_point()):
        msg = (
            f"export(merged=True) cannot merge into {name!r}, which is quantized: write the adapters with "
            "export(adapter=True), and load them over the base in full precision to merge there"
        )
        raise ConfigError(msg)


@torch.no_grad()
def _merged(layer: nn.Module, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an adapted layer's base after peft has merged its active adapters."""
    alone: Any = _whole_layer(layer, path, tensors)
    try:
        if hasattr(alone, "unload_and_optionally_merge_module"):
            base = alone.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            alone.merge(safe_merge=True)
            base = alone.get_base_layer()
    except (RuntimeError, ValueError) as error:
        msg = f"peft cannot merge the adapters of {path!r} into its weight: {error}"
        raise StateError(msg) from error
    return {plain_name(name): tensor for name, tensor in base.state_dict().items()}


def _whole_layer(module: nn.Module, path: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module, of its class before any backend changed that, with whole tensors.

    Without hooks, and with its own lists and dicts, in which peft notes what is merged.
    """
    alone = object.__new__(_plain_class(type(module)))
    for key, value in vars(module).items():
        if key.endswith("_hooks"):
            alone.__dict__[key] = OrderedDict()
        elif type(value) in (list, dict, set):
            alone.__dict__[key] = copy.copy(value)
        else:
            alone.__dict__[key] = value
    alone.__dict__["_parameters"] = {
        name: None if own is None else nn.Parameter(tensors[f"{path}.{name}"], requires_grad=False)
        for name, own in module._parameters.items()
    }
    alone.__dict__["_buffers"] = {n: tensors.get(f"{path}.{n}", own) for n, own in module._buffers.items()}
    alone.__dict__["_modules"] = {
        name: None if child is None else _whole_layer(child, f"{path}.{name}", tensors)
        for name, child in module._modules.items()
    }
    return alone


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before a backend split or sharded it."""
    # By its parents: a generated class may have the module and the name of the class that it extends.
    brought = ("tp_core.", "tp_shard.", "torch.distributed.")
    return next(c for c in kind.__mro__ if not any(f"{p.__module__}.".startswith(brought) for p in c.__mro__))
