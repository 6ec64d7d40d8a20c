"""Trial runs of a model: calls and the tensors in them, copies of the model, and small batches."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.compare import copied, first_token, mapped, named_tensors, other_batches, watched_tables
from tp_core.random import preserve_rng_state, preserve_torch_rng_state, seed_torch
from tp_core.tensors import copy_attributes

from tp_shard._plans._adapters import inside_peft, is_adapted

Loss = Callable[[Any], Tensor]
_MOST = 6  # shapes in a message


@dataclass(frozen=True, slots=True)
class TrialCall:
    """A call of a module, with its loss.

    Attributes:
        loss: A function from the module's output to a loss; by default the module's own loss, or a fixed sum
            of all outputs.
        training: Whether the module is in training mode; dropout is left out in both modes.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    training: bool = False

    def __str__(self) -> str:
        """Return the shapes of the arguments."""
        arguments: dict[str, Any] = {f"[{i}]": value for i, value in enumerate(self.args)}
        arguments |= self.kwargs
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors_of(arguments)]
        if not shapes:
            return "no tensors"
        listed = ", ".join(shapes[:_MOST])
        if len(shapes) > _MOST:
            return f"{listed}, ..."
        return listed


def tensors_of(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, each with its place; "output" for a value that is a tensor."""
    return ((at or "output", tensor) for at, tensor in named_tensors(value, place))


def fresh(value: Any) -> Any:
    """Return a copy of arguments for one run, with gradients of its own."""
    return mapped(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments on the CPU, with floating-point tensors in ``dtype`` that require gradients."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().cpu()
        return tensor.detach().cpu().to(dtype).clone().requires_grad_()

    return mapped(value, one)


def first_alone(output: Any) -> Tensor:
    """Return a loss of the first output of a module alone; other outputs may be a rank's own."""
    return loss_of(None, dict([next(tensors_of(output))]), None)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0]}"


def loss_of(output: Any, tensors: Mapping[str, Tensor], loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            weights = torch.arange(tensor.numel(), dtype=torch.float64).mul_(0.7).cos_().view(tensor.shape)
            wide = tensor.double()
            finite = wide.isfinite()
            wide = torch.where(finite, wide, torch.zeros_like(wide))
            total = total + (wide * weights).sum() + 0.1 * wide.square().mean()
    return total


# -- Copies of a model: in another type, with other values, and one module for equal blocks


_DEEP = 4  # the depth to which configurations of blocks are compared

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def probe_copy(model: nn.Module, *, dtype: torch.dtype, random: bool, share: bool) -> nn.Module:
    """Return a copy on the CPU, in ``dtype``; the model is not changed.

    Tensors on the meta device get random values; with ``random`` all parameters do: zeros and equal values
    would hide differences. With ``share`` equal blocks of one list become one module, which saves
    their memory.
    """
    memo: dict[int, Any] = {}
    repeats = repeated_blocks(model) if share else {}
    generator = torch.Generator().manual_seed(0)
    for module in _reached(model, set(repeats)):
        for name, p in module._parameters.items():
            if p is not None and id(p) not in memo:
                values = p.detach()
                if random or p.is_meta:
                    values = _draw(module, p, name, generator)
                values = values.cpu()
                if p.is_floating_point():
                    values = values.to(dtype)
                if values.data_ptr() == p.data_ptr():
                    values = values.clone()
                memo[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                copy_attributes(p, memo[id(p)])
        for b in module._buffers.values():
            if b is not None and id(b) not in memo:
                memo[id(b)] = _buffer(b, dtype, generator)
    for repeat, first in reversed(list(repeats.items())):  # inner lists before outer ones
        block = copied(_by_id(model, first), memo)
        memo[repeat] = block
    return copied(model, memo)


def bytes_needed(model: nn.Module, dtype: torch.dtype, *, share: bool) -> int:
    """Return the bytes that a comparison of a :func:`probe_copy` with a split one needs."""
    repeats = set(repeated_blocks(model)) if share else set()
    seen = {id(p): p for m in _reached(model, repeats) for p in m._parameters.values() if p is not None}
    # The copy, the one that runs whole, the shards of all ranks, and one that is being split; with gradients.
    return 7 * dtype.itemsize * sum(p.numel() for p in seen.values())


def repeated_blocks(model: nn.Module) -> dict[int, int]:
    """Return the blocks of lists that are built like an earlier one, each with that one, by their ids."""
    repeats: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        first: dict[Any, int] = {}
        for block in module.children():
            key = _structure(block)
            if first.setdefault(key, id(block)) != id(block):
                repeats.setdefault(id(block), first[key])
    return repeats


def _structure(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that differ only in their weights and their place."""
    keys = []
    for path, module in block.named_modules():
        parameters = []
        for name, p in module._parameters.items():
            if p is None:
                description = None
            else:
                description = (p.shape, p.requires_grad)
            parameters.append((name, description))
        buffers = [(name, _content(buffer)) for name, buffer in module._buffers.items()]
        attributes = [
            (name, _content(value))
            for name, value in sorted(vars(module).items())
            if not _is_place(module, name)
        ]
        keys.append((path, type(module), tuple(parameters), tuple(buffers), tuple(attributes)))
    return tuple(keys)


def _is_place(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is compared elsewhere, or depends on the module's place in the model."""
    if name in ("_parameters", "_buffers", "_modules"):
        return True
    # Arguments of peft with the name of the layer in the model, and objects without state.
    if name in ("kwargs", "lora_variant") and is_adapted(module):
        return True
    return any(word in name for word in ("idx", "index", "layer_id"))


def _content(value: Any, depth: int = 0) -> Any:
    """Return a key that is equal for values with the same effect."""
    if isinstance(value, int | float | str | None):
        return type(value), value
    if isinstance(value, Tensor):
        if value.is_meta or value.is_sparse:
            return value.shape, value.dtype
        return value.shape, hash(value.detach().cpu().double().numpy().tobytes())
    if isinstance(value, nn.Module):
        return type(value)
    if depth > _DEEP:
        return id(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_content(item, depth + 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(repr, value))
    if isinstance(value, Mapping):  # configurations and hooks, too
        return type(value), tuple((repr(key), _content(item, depth + 1)) for key, item in value.items())
    attributes = getattr(value, "__dict__", None)
    if isfunction(value) or not attributes:
        return id(value)
    return type(value), _content(attributes, depth + 1)


def _reached(root: nn.Module, repeats: set[int]) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if id(child) not in repeats:
            yield from _reached(child, repeats)


def _by_id(model: nn.Module, wanted: int) -> nn.Module:
    return next(m for m in model.modules() if id(m) == wanted)


def _draw(module: nn.Module, p: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """Draw values of usual size: weights scaled by their width, scales about 1, biases about 0."""
    values: Tensor = torch.randn(p.shape, generator=generator, dtype=torch.float32)
    if p.dim() > 1:
        # With larger weights a later softmax would saturate, and its gradients would be rounding alone.
        width = p.size(-1)
        if isinstance(module, _CONVOLUTIONS):
            width = p[0].numel()
        return values / math.sqrt(max(1, width))
    if name == "weight":
        return 0.3 * values + 1.0
    return 0.3 * values


def _buffer(b: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not b.is_meta:
        values = b.detach().cpu().clone()
    elif b.is_floating_point():
        values = torch.rand(b.shape, generator=generator, dtype=torch.float32)
    else:
        places = b.size(-1) if b.dim() else 1
        values = torch.arange(places).expand(b.shape).clone().to(b.dtype)
    if values.is_floating_point():
        return values.to(dtype)
    return values


# -- Small batches, in place of a missing batch and beside a given one ----------------------------


# Of a batch of tokens, (rows, places), and how many more one of another shape has.
_ROWS = 2
_PLACES = 7
_MORE_ROWS = 1
_MORE_PLACES = 3


def example_call(model: nn.Module) -> TrialCall | None:
    """Return a call that a model may take, from a transformers configuration, or of tokens; else ``None``."""
    with preserve_torch_rng_state(()):
        seed_torch(0, ())
        if hasattr(model, "config") and isinstance(getattr(model, "main_input_name", None), str):
            return _of_transformers(model)
        table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
        if table is None:
            return None
        return TrialCall((_tokens(table.num_embeddings),))


def _of_transformers(model: Any) -> TrialCall | None:
    # Of the model inside, because a `PeftModel` passes on what it does not name.
    config = model.config
    accepted = inspect.signature(inside_peft(model)[1].forward).parameters
    main = model.main_input_name
    inputs: dict[str, Any] = {}
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    takes_text = "input_ids" in accepted and main in ("input_ids", "pixel_values")
    if takes_text and getattr(text, "vocab_size", None):
        inputs["input_ids"] = _tokens(text.vocab_size)
    takes_pictures = "pixel_values" in accepted and (main == "pixel_values" or "input_ids" in inputs)
    if takes_pictures and _sized(vision):
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs["pixel_values"] = torch.randn(_ROWS, getattr(vision, "num_channels", 3), height, width)
    if main == "input_features":
        places = 2 * getattr(config, "max_source_positions", 50)
        inputs["input_features"] = torch.randn(_ROWS, getattr(config, "num_mel_bins", 80), places)
    if main == "input_values":
        inputs["input_values"] = torch.randn(_ROWS, 4000)
    if not inputs:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _tokens(text.vocab_size)[:, :-2]
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return TrialCall((), inputs)


def without_cache(model: nn.Module, call: TrialCall) -> TrialCall:
    """Return a call without a cache of keys and values, and disable caches in the model's configurations.

    A cache is filled by the first call and read by the next one, and its content counts as a result.
    """
    waiting = [vars(module).get("config") for module in model.modules()]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]  # it has one, as seen
        waiting += [inner for inner in vars(config).values() if hasattr(inner, "use_cache")]
    if "use_cache" not in inspect.signature(model.forward).parameters:
        return call
    return replace(call, kwargs={**call.kwargs, "use_cache": False})


def other_calls(model: nn.Module, call: TrialCall) -> Iterator[TrialCall]:
    """Yield calls of the same kind with random values, of another shape first; see :func:`other_batches`."""
    originals = [tensor for _, tensor in tensors_of((call.args, dict(call.kwargs)))]
    args, kwargs = fresh(call.args), fresh(dict(call.kwargs))
    copies = [tensor for _, tensor in tensors_of((args, kwargs))]
    model = copied(model)  # buffers and counts of calls stay as they are
    with torch.no_grad(), preserve_rng_state(), watched_tables(model, copies) as tables_of_copies:
        model(*args, **kwargs)
    tables = {
        id(original): tables_of_copies[id(copy)]
        for original, copy in zip(originals, copies, strict=True)
        if id(copy) in tables_of_copies
    }
    for args, kwargs in other_batches((call.args, dict(call.kwargs)), tables, _sizes):
        yield replace(call, args=args, kwargs=kwargs)


def _sizes(rows: int, places: int) -> list[tuple[int, int]]:
    return [(rows + _MORE_ROWS, places + _MORE_PLACES), (rows + _MORE_ROWS, places), (rows, places)]


def _sized(config: Any) -> bool:
    return isinstance(getattr(config, "image_size", None), int | tuple | list)


def _tokens(count: int) -> Tensor:
    return torch.randint(first_token(count), count, (_ROWS, _PLACES))
