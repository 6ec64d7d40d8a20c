"""Small batches to try a model on: instead of one that was not given, and beside one that was."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._verify._call import Call, fresh, mapped, tensors_of

__all__ = ["example_call", "other_calls", "without_cache"]

_ROWS, _PLACES = 2, 7
_MORE_ROWS, _MORE_PLACES = 1, 3


def example_call(model: nn.Module) -> Call | None:
    """Return what a model may be called with: for one of transformers by its configuration, else tokens.

    Returns:
        ``None`` where that is not known.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if hasattr(model, "config") and isinstance(getattr(model, "main_input_name", None), str):
            return _of_transformers(model)
        table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
        return None if table is None else Call((_tokens(table.num_embeddings),))


def _of_transformers(model: Any) -> Call | None:
    config, accepted = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    given: dict[str, Any] = {}
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    if (
        "input_ids" in accepted
        and getattr(text, "vocab_size", None)
        and main in ("input_ids", "pixel_values")
    ):
        given["input_ids"] = _tokens(text.vocab_size)
    if "pixel_values" in accepted and (main == "pixel_values" or "input_ids" in given) and _sized(vision):
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        given["pixel_values"] = torch.randn(_ROWS, getattr(vision, "num_channels", 3), height, width)
    if main == "input_features":
        places = 2 * getattr(config, "max_source_positions", 50)
        given["input_features"] = torch.randn(_ROWS, getattr(config, "num_mel_bins", 80), places)
    if main == "input_values":
        given["input_values"] = torch.randn(_ROWS, 4000)
    if not given:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = _tokens(text.vocab_size)[:, :-2]
    if "use_cache" in accepted:
        given["use_cache"] = False
    return Call((), given)


def without_cache(model: nn.Module, call: Call) -> Call:
    """Return a call that fills no cache of keys and values, and let no configuration ask for one.

    A cache is filled by the first call and read by the next one; what is kept in it counts as a result.

    Args:
        model: A copy for this alone; its configurations are changed.
        call: What it is called with.
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


def other_calls(model: nn.Module, call: Call) -> Iterator[Call]:
    """Yield calls of the same kind with random values, of another shape first.

    Values that are all alike, and single places, hide what a plan does to a model. Tokens are drawn from the
    table that they are looked up in; other numbers without fractions, such as masks, are repeated.

    Args:
        model: The model, in evaluation.
        call: What it takes.
    """
    counts = _looked_up(model, call)
    named = list(tensors_of((call.args, dict(call.kwargs))))
    given = [tensor for _, tensor in named]
    masks = {id(tensor) for name, tensor in named if "mask" in name}
    lead = next((t for t in given if id(t) in counts and t.dim() > 1), None)
    lead = next((t for t in given if t.dim() > 1), None) if lead is None else lead
    generator = torch.Generator().manual_seed(0)
    changes = ((_MORE_ROWS, _MORE_PLACES), (_MORE_ROWS, 0), (0, 0)) if lead is not None else ((0, 0),)
    lead_rows, lead_places = (-1, -1) if lead is None else (lead.size(0), lead.size(1))
    for rows, places in changes:

        def other(tensor: Tensor, rows: int = rows, places: int = places) -> Tensor:
            made = tensor.detach()
            for dim, size in enumerate(tensor.shape):
                more = rows if dim == 0 and size == lead_rows else 0
                more = places if dim > 0 and size == lead_places else more
                made = made.index_select(dim, torch.arange(size + more) % size) if more else made
            if id(tensor) in masks:
                return made.clone()
            return _drawn(made, counts.get(id(tensor)), generator).requires_grad_(tensor.requires_grad)

        args, kwargs = mapped((call.args, dict(call.kwargs)), other)
        yield replace(call, args=args, kwargs=kwargs)


def _looked_up(model: nn.Module, call: Call) -> dict[int, int]:
    """Return the sizes of the tables that tensors of a call are looked up in, by the tensors' ids."""
    args, kwargs = fresh(call.args), fresh(dict(call.kwargs))
    given = [tensor for _, tensor in tensors_of((call.args, dict(call.kwargs)))]
    copies = [tensor for _, tensor in tensors_of((args, kwargs))]
    found: dict[int, int] = {}

    def note(table: nn.Embedding, places: Any) -> None:
        if not isinstance(places, Tensor):
            return  # a table of positions, which takes the shape
        for tensor, copied in zip(given, copies, strict=True):
            same = copied.untyped_storage().data_ptr() == places.untyped_storage().data_ptr()
            # Labels that a model moves by one place, to be the tokens of its decoder.
            moved = copied.shape == places.shape and copied.dim() == 2 and copied.size(1) > 1
            if same or (moved and torch.equal(copied[:, :-1], places[:, 1:])):
                found.setdefault(id(tensor), table.num_embeddings)

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [
        t.register_forward_pre_hook(lambda m, given: note(m, given[0]) if given else None) for t in tables
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _drawn(like: Tensor, count: int | None, generator: torch.Generator) -> Tensor:
    """Draw tokens of a table of ``count``, or numbers as large as some others; what is neither stays."""
    if count is not None:
        return torch.randint(_first(count), count, like.shape, generator=generator, dtype=like.dtype)
    if not like.is_floating_point() or not like.isfinite().all() or like.unique().numel() in (0, 2):
        return like.clone()  # as masks are
    if float(like.min()) >= 0 and float(like.max()) <= 1:
        return torch.rand(like.shape, generator=generator, dtype=like.dtype)
    spread = like.std(correction=0)
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return like.mean() + (spread if spread > 0 else 1.0) * drawn


def _sized(config: Any) -> bool:
    return isinstance(getattr(config, "image_size", None), int | tuple | list)


def _tokens(count: int) -> Tensor:
    return torch.randint(_first(count), count, (_ROWS, _PLACES))


def _first(count: int) -> int:
    """Return the first token past those with a meaning of their own, which usually come first."""
    return 10 if count > 20 else 0
