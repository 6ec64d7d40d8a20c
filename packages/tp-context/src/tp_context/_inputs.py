"""What a split model is given beside its slices: positions, labels that are shifted before the cut.

A model that counts positions from 0, or shifts labels within the slice, would be wrong at every seam. So the
forward of the model gets them made from the whole sequence. Models number positions differently; the check
before the first step takes the first scheme that it can prove.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, ValuesView
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_context._attention import NAME, register_with_transformers
from tp_context._patches import patched
from tp_context._slices import Cut, Cuts, Loss
from tp_context._split_state import split_states

_IGNORED = -100  # torch's and transformers' number of a label that does not count


Positions = Literal["range", "mask", "tokens", "modules", "own"]


class InputScheme(NamedTuple):
    """What a model is given of whole sequences beside its slices.

    Attributes:
        positions: The numbers of ``position_ids``: from 0 ("range"); of tokens that the mask of padding shows
            ("mask"); as the model's embedding makes them from the tokens ("tokens"); those that embeddings of
            positions take, as BART's ("modules"); or none of ours ("own").
        shifts: Whether the model's loss compares with the label of the next token.
        packs: Whether position numbers that begin again begin a document, as in most models of transformers.
    """

    positions: Positions
    shifts: bool
    packs: bool = True


def input_schemes(model: nn.Module, *, has_positions: bool) -> list[InputScheme]:
    """Return the schemes to try, the likeliest first; ``has_positions``: the batch has its own."""
    called = _called(model)
    takes = {name for each in called for name in _parameters_of(each)}
    numbers: list[Positions] = ["modules", "own"] if any(_numbered_modules(model)) else ["own"]
    if "position_ids" in takes and not has_positions:
        numbers = ["range", "mask", "tokens", *numbers]
        if _numbering_of(model) is None:
            numbers.remove("tokens")
        else:
            numbers.insert(0, "tokens")
    if "labels" in takes and any(map(_takes_more, called)):
        shifts = [True, False]
    else:
        shifts = [False]
    if has_positions and _pretrained(model):
        packs = [True, False]
    else:
        packs = [False]
    return [InputScheme(n, s, p) for n in dict.fromkeys(numbers) for p in packs for s in shifts]


@contextmanager
def splitting(model: nn.Module, cuts: Cuts, scheme: InputScheme) -> Iterator[None]:
    """Context in which ``model`` runs on slices: with whole attention, positions and shifted labels."""
    with ExitStack() as stack:
        for inner in _pretrained(model):
            stack.enter_context(_attending(inner))
        for module in model.modules():
            if _has_relative_bias(module):
                stack.enter_context(_whole_bias(module))
        if scheme.positions == "modules":
            for module in _numbered_modules(model):
                hook = module.register_forward_pre_hook(_number, with_kwargs=True)
                stack.callback(hook.remove)
        for called in _called(model):
            before = called.register_forward_pre_hook(_ForwardArguments(cuts, scheme), with_kwargs=True)
            stack.callback(before.remove)
        stack.callback(model.register_forward_hook(_NoGradient(cuts)).remove)
        stack.enter_context(split_states.changed(cuts=cuts))
        stack.enter_context(patched())
        yield


# -- The arguments of the forward -------------------------------------------------------------------


class _ForwardArguments:
    """A hook that completes the arguments of a model's forward."""

    def __init__(self, cuts: Cuts, scheme: InputScheme) -> None:
        self.cuts = cuts
        self.scheme = scheme

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(_parameters_of(model))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        inputs = arguments.get("input_ids")
        if inputs is None:
            inputs = arguments.get("inputs_embeds")
        cut = None
        if isinstance(inputs, Tensor) and inputs.dim() >= 2:
            cut = split_states.slice_of(inputs.size(1))
        kwargs = dict(kwargs)
        if cut is None or inputs is None:  # a decoder may be split beside an encoder of sound or images
            self._shift(model, arguments, kwargs)
            return args, kwargs
        self.cuts.packed = self._documents(model, arguments, cut)
        is_ours = self.scheme.positions not in {"modules", "own"} and "position_ids" in names
        if is_ours and arguments.get("position_ids") is None:
            kwargs["position_ids"] = self._positions(arguments, cut, inputs, model)
        has_numbers = arguments.get("position_ids") is not None or "position_ids" in kwargs
        if has_numbers and arguments.get("attention_mask") is None and "attention_mask" in names:
            # Or transformers would look for packed documents in a slice of the numbers.
            kwargs["attention_mask"] = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        self._shift(model, arguments, kwargs)
        return args, kwargs

    def _positions(self, arguments: Mapping[str, Any], cut: Cut, inputs: Tensor, model: nn.Module) -> Tensor:
        """Return this rank's position numbers: (batch, tokens)."""
        rows = inputs.size(0)
        mask = arguments.get("attention_mask")
        if self.scheme.positions == "mask" and isinstance(mask, Tensor) and mask.dim() == 2:
            if mask.size(1) == cut.tokens:
                mask = cut.gather(mask, 1)
            numbers = mask.long().cumsum(1) * mask.long() - 1
            return cut.take(numbers, 1)
        if self.scheme.positions == "tokens" and arguments.get("input_ids") is not None:
            number, padding = _numbering_of(model) or (None, 0)
            if number is not None:
                return cut.take(number(cut.gather(arguments["input_ids"], 1), padding), 1)
        return cut.index(inputs.device)[None].expand(rows, -1)

    def _documents(
        self, model: nn.Module, arguments: Mapping[str, Any], cut: Cut
    ) -> tuple[Tensor, Tensor] | None:
        """Return the whole positions and the documents that transformers would find in them, if it would.

        It looks for them only where there is neither a mask nor a cache.
        """
        numbers = arguments.get("position_ids")
        caches = arguments.get("use_cache")
        if caches is None:
            caches = getattr(getattr(model, "config", None), "use_cache", False)
        if (
            not self.scheme.packs
            or not isinstance(numbers, Tensor)
            or numbers.dim() != 2
            or numbers.size(1) != cut.tokens
            or arguments.get("attention_mask") is not None
            or arguments.get("past_key_values") is not None
            or caches
        ):
            return None
        whole = cut.gather(numbers, 1)
        begins = torch.diff(whole, prepend=whole[:, :1] - 1, dim=-1) != 1
        if not bool(begins.any()):
            return None
        return whole, begins.cumsum(-1)

    def _shift(self, model: nn.Module, arguments: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
        """Shift the labels before the cut, and count those of this rank."""
        labels = arguments.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() != 2:
            return
        cut = split_states.slice_of(labels.size(1))
        if cut is None:
            return
        make_inputs = _decoder_inputs_of(model)
        has_inputs = any(
            arguments.get(f"decoder_{kind}") is not None for kind in ("input_ids", "inputs_embeds")
        )
        if make_inputs is not None and not has_inputs:
            kwargs["decoder_input_ids"] = cut.take(make_inputs(labels=cut.gather(labels, 1)), 1)
        if self.scheme.shifts and arguments.get("shift_labels") is None:
            labels = cut.take(F.pad(cut.gather(labels, 1), (0, 1), value=_IGNORED)[:, 1:], 1)
            kwargs["shift_labels"] = labels
        elif arguments.get("shift_labels") is not None:
            labels = arguments["shift_labels"]
        self.cuts.loss.units = float((labels != _IGNORED).sum())


class _NoGradient:
    """A hook on a model's outputs that replaces gradients by zeros where this rank's loss counts nothing.

    Such a loss may be NaN, a mean over no token. Keys and values have gradients of other ranks, which stay.
    """

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts

    def __call__(self, _model: nn.Module, _args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else output
        if isinstance(values, Tensor):
            values = [values]
        elif not _is_listed(values):
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_without_nan, self.cuts.loss))


def _without_nan(loss: Loss, grad: Tensor) -> Tensor | None:
    if loss.counts:
        return None
    return torch.zeros_like(grad)


def _is_listed(values: Any) -> bool:
    return isinstance(values, tuple | list | ValuesView)


def _called(model: nn.Module) -> list[nn.Module]:
    """Return the modules with forwards of tokens and labels: the model, or those in a wrapper."""
    return _pretrained(model) or [model]


def windows_of(model: nn.Module) -> list[int | None]:
    """Return the window of each layer of transformers' models, as their configurations say."""
    windows: list[int | None] = []
    for inner in _called(model):
        config = getattr(inner, "config", None)
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and getattr(config, "use_sliding_window", True):
            kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
            windows += [window if kind == "sliding_attention" else None for kind in kinds]
    return windows


def _parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _takes_more(model: nn.Module) -> bool:
    """Return whether the forward takes further names, which transformers' models pass on to their loss."""
    parameters = _parameters_of(model)
    return "shift_labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _numbered_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings of positions that take their numbers, and count from 0 without them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and "position_ids" in _parameters_of(module):
            yield module


def _number(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give an embedding of positions this rank's numbers, where it has none or those from 0."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    numbers = bound.arguments.get("position_ids")
    if numbers is None:
        inputs = next(iter(bound.arguments.values()))
        tokens = getattr(inputs, "shape", inputs)[1]  # some take a shape
    else:
        tokens = numbers.shape[-1]
    cut = split_states.slice_of(tokens)
    if cut is None:
        return None
    index = cut.index(next(module.parameters()).device)
    if numbers is None:
        bound.arguments["position_ids"] = index
    else:
        bound.arguments["position_ids"] = index[numbers]
    return bound.args, bound.kwargs


def _numbering_of(model: nn.Module) -> tuple[Callable[[Tensor, int], Tensor], int] | None:
    """Return the function by which embeddings such as RoBERTa's number tokens, and the padding's number."""
    for module in model.modules():
        number = getattr(module, "create_position_ids_from_input_ids", None)
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and _takes(number, "input_ids", "padding_idx"):
            return cast("Callable[[Tensor, int], Tensor]", number), padding
    return None


def _decoder_inputs_of(model: nn.Module) -> Callable[..., Tensor] | None:
    """Return the method by which a model makes the inputs of its decoder from labels, if it has one."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if "decoder_input_ids" in _parameters_of(model) and _takes(make, "labels"):
        return cast("Callable[..., Tensor]", make)
    return None


def _takes(method: Any, *names: str) -> bool:
    """Return whether a method's first parameters have these names, and all others a default.

    Models of the same name take other arguments: then it is another method.
    """
    if not callable(method):
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    rest = [p for p in parameters[len(names) :] if p.kind not in variadic]
    has_names = [p.name for p in parameters[: len(names)]] == list(names)
    return has_names and all(p.default is not p.empty for p in rest)


# -- Changes of a model of transformers while it runs on slices -------------------------------------


def _pretrained(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers in ``model``; nothing is imported for it."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # The names of modules within a module begin with its name and a dot; the model's own name is empty.
        is_inner = "" in outermost or any(name.startswith(f"{outer}.") for outer in outermost)
        if isinstance(module, PreTrainedModel) and not is_inner:
            outermost[name] = module
    return list(outermost.values())


@contextmanager
def _attending(model: Any) -> Iterator[None]:
    """Context in which a model of transformers calls our attention, by its own public switch."""
    if not model._can_set_attn_implementation():  # as its switch asks, which would log a warning in each step
        yield
        return
    register_with_transformers()
    config = model.config
    before = {"": config._attn_implementation} | {
        name: sub._attn_implementation
        for name in config.sub_configs
        if (sub := getattr(config, name, None)) is not None
    }
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _has_relative_bias(module: nn.Module) -> bool:
    """Return whether a module computes a bias of all queries and all keys, as attention of T5 does.

    Others have the name with other arguments: LongT5's local attention, which has a bias of blocks.
    """
    # Not by hasattr: a module looks slowly for what it has not, and each is asked twice in a step.
    if not hasattr(type(module), "compute_bias") and "compute_bias" not in vars(module):
        return False
    if not hasattr(module, "relative_attention_bias"):
        return False
    return _takes(module.compute_bias, "query_length", "key_length")


@contextmanager
def _whole_bias(module: Any) -> Iterator[None]:
    """Slice T5-style relative position bias to this rank's queries; it keeps the columns of all keys."""
    compute = module.compute_bias

    def of_whole(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        rows = split_states.slice_of(query_length)
        keys = split_states.slice_of(key_length)
        if rows is None or keys is None:
            bias: Tensor = compute(query_length, key_length, *args, **kwargs)
            return bias
        return rows.take(compute(rows.length, keys.length, *args, **kwargs), -2)

    module.compute_bias = of_whole
    try:
        yield
    finally:
        del module.compute_bias
