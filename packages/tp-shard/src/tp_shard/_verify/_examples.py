"""A small batch to try a model on, where none was given."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._verify._call import Call

__all__ = ["example_call"]

_ROWS, _PLACES = 2, 7


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


def _sized(config: Any) -> bool:
    return isinstance(getattr(config, "image_size", None), int | tuple | list)


def _tokens(count: int) -> Tensor:
    """Draw tokens, past those with a meaning of their own that usually come first."""
    return torch.randint(min(10, count - 1), count, (_ROWS, _PLACES))
