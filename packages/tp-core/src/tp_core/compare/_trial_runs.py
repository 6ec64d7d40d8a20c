"""What verifications of parallel models share: tensors by place, no dropout, lines of ``forward``."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def named_tensors(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, each with its place."""
    if isinstance(value, Tensor):
        yield place, value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        items = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    for key, inner in items:
        inner_place = f"{place}.{key}" if place else str(key)
        yield from named_tensors(inner, inner_place)


def functions_named(names: str) -> frozenset[Any]:
    """Return the functions of torch with these names, as far as this version has them."""
    homes = (torch, Tensor, nn.functional)
    return frozenset(getattr(home, name) for home in homes for name in names.split() if hasattr(home, name))


def in_backward_pass() -> bool:
    """Return whether autograd runs the caller, as it does to recompute what a checkpoint dropped."""
    # Private: no public function says so. `test_what_a_checkpoint_computes_again_is_recorded_once` notices
    # its loss.
    return torch._C._current_graph_task_id() != -1


def dropout_rates(module: nn.Module) -> list[str]:
    is_dropout = "Dropout" in type(module).__name__
    rates = [key for key, value in vars(module).items() if type(value) is float and value]
    return [key for key in rates if "drop" in key or (key == "p" and is_dropout)]


# The place of ``dropout_p`` among the arguments.
_DROPOUT_PLACES = {
    nn.functional.scaled_dot_product_attention: 4,
    nn.functional.multi_head_attention_forward: 10,  # a mode does not see the calls inside it
}


def call_without_attention_dropout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that a `TorchFunctionMode` got; one that attends, without dropout of its weights."""
    place = _DROPOUT_PLACES.get(func)
    if place is None:
        return func(*args, **kwargs)
    if len(args) > place:
        return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
    return func(*args, **{**kwargs, "dropout_p": 0.0})


class WithoutDropout(TorchFunctionMode):
    """A mode without dropout, wherever a model calls it: ranks rightly draw other masks than one process.

    Args:
        model: A model to set to rates of 0 in the block, for code with a mode that draws before this one is
            asked; by default none.

    Attributes:
        DROPOUTS: The functions of torch that it leaves out.
    """

    DROPOUTS = functions_named(
        "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout "
        "feature_dropout_ feature_alpha_dropout feature_alpha_dropout_"
    )

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        modules = () if model is None else model.modules()
        self._rates = [(m, key, getattr(m, key)) for m in modules for key in dropout_rates(m)]

    def __enter__(self) -> Self:
        for module, key, _ in self._rates:
            setattr(module, key, 0.0)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        for module, key, rate in self._rates:
            setattr(module, key, rate)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.DROPOUTS:
            if args:
                return args[0]
            return kwargs["input"]
        return call_without_attention_dropout(func, args, kwargs)


class ForwardLines:
    """A context manager that records which lines of the modules' own ``forward`` run; not of torch's.

    It traces this thread (`sys.settrace`), unless a debugger or a measurement of coverage does already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Any, str] = {}
        for kind in {type(m) for m in model.modules() if not type(m).__module__.startswith("torch.")}:
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            if code is not None:
                self._names[code] = f"{kind.__qualname__.rpartition('.')[2]}.forward"
        self._ran: dict[Any, set[int]] = {code: set() for code in self._names}
        self._traces = sys.gettrace() is None

    def __enter__(self) -> Self:
        if self._traces:
            sys.settrace(self._enter)
        return self

    def _enter(self, frame: Any, _event: str, _arg: Any) -> Any:
        # only there line by line
        if frame.f_code in self._names:
            return self._step
        return None

    def _step(self, frame: Any, event: str, _arg: Any) -> Any:
        if event == "line":
            self._ran[frame.f_code].add(frame.f_lineno)
        return self._step

    def __exit__(self, *_: object) -> None:
        if self._traces:
            sys.settrace(None)

    def idle(self) -> tuple[str, ...]:
        """Return the lines that have not run: ``Block.forward, line 63``; none if they were not traced."""
        return tuple(
            f"{name}, line {line}"
            for code, name in self._names.items()
            for line in sorted({line for _, _, line in code.co_lines() if line} - {code.co_firstlineno})
            if self._traces and line not in self._ran[code]
        )


def idle_lines_in_words(lines: tuple[str, ...], most: int = 4) -> str:
    """Return the first lines that have not run as one text, and how many more there are."""
    more = f"; {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
