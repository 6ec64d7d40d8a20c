"""Joins each Python process of a command that ``tp verify --resume`` runs, and records what it trains.

``site`` imports this file first, as its folder is on ``PYTHONPATH``. The program may be of any library, in
any environment: this file needs torch alone, and waits until the program imports it. For each optimizer step
a rank writes a line of JSON: the rows that its model got, digests of weights, optimizer state and random
numbers. Another line stands for each moment at which it writes to the folder of its checkpoints.

The variable ``TP_VERIFY_RESUME`` has the settings as JSON: "records", where lines go; "folder", that of the
checkpoints; "kill", where the run ends: {"signal": 9 or 15, "step": 5}, with "moment" also within what is
saved after that step.
"""

import ctypes
import functools
import gc
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "TP_VERIFY_RESUME"
PID = "command.pid"
"""The file among the records with the process that the command began with."""

_WIDTH = 32
"""The numbers of a sketch. What it says of a distance is some 25 % off."""

_WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What DDP, compiling and others put before the names of a model's parameters."""

_CHANGES = {
    "os.rename": "gets its name",
    "os.mkdir": "is made",
    "os.remove": "is removed",
    "os.rmdir": "is removed",
    "os.truncate": "is cut",
    "os.link": "is linked",
    "os.symlink": "is linked",
}
"""Audit events of what changes a folder, beside opened files."""


def end_all(records: str) -> None:
    """End all processes of a run, this one last; they have its settings in their environment."""
    mark, own = json.dumps(records).encode(), os.getpid()
    is_own = False
    found = True
    while found:  # a process may have started another one before it was reached
        found = False
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with suppress(OSError):  # it ended, or is another user's
                if mark not in (process / "environ").read_bytes():
                    continue
                if int(process.name) == own:
                    is_own = True
                    continue
                os.kill(int(process.name), signal.SIGKILL)
                found = True
        if found:
            time.sleep(0.01)  # one that ends keeps its environment for a moment
    if is_own:
        os.kill(own, signal.SIGKILL)


# -- Tensors in short -------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a tensor; NumPy may not be there."""
    whole = tensor.contiguous()
    if not whole.numel():
        return b""
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


def _short(value: Any) -> tuple[str, list[float], str] | None:
    """Return a digest of a tensor or number, a sketch, and its type and shape.

    The distance of two sketches is about that of the tensors: each number of them is a sum of elements with
    signs as if drawn. ``None`` stands for what is neither.
    """
    import torch

    if isinstance(value, bool | int | float):
        return repr(value), [float(value)], ""
    if not isinstance(value, torch.Tensor):
        return None
    tensor = value.detach()
    if hasattr(tensor, "full_tensor"):  # a DTensor: all ranks that have a part of it are in this step
        tensor = tensor.full_tensor()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    digest = _digest(_bytes_of(tensor) + kind.encode())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.double().flatten()
    places = torch.arange(flat.numel())
    flat = flat * (1 - 2 * ((places * 2654435761 >> 15) & 1))
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _WIDTH))
    return digest, padded.view(-1, _WIDTH).sum(0).tolist(), kind


def _tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested arguments."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _batch_of(module: Any, arguments: Any) -> Any:
    """Return the first tensor of a call that can be a batch: of a module in training, and not computed."""
    import torch

    if not module.training:
        return None
    if torch._C._current_graph_task_id() != -1:  # what a checkpoint computes again
        return None
    for tensor in _tensors_in(arguments):
        if tensor.dim() and not tensor.requires_grad:  # others come from another model
            return tensor
    return None


def _trained_in(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


# -- The recorder of a process ----------------------------------------------------------------------------


class _Recorder:
    """What one process has trained so far.

    A process that was forked from a recorded one begins anew: a worker of a loader never steps.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.records: str = settings["records"]
        self.folder: str = settings["folder"]
        self.kill: dict[str, int] = settings["kill"]
        self.begin()

    def begin(self) -> None:
        self.pid = os.getpid()
        self.file = -1
        self.is_broken = False
        self.is_ending = False
        self.step = 0
        self.moments = 0  # since the last step
        self.rows: list[str] = []
        self.calls = threading.local()  # for each module that is being called, the inputs of those within
        self.names: dict[int, str] = {}  # of parameters, by their id
        self.roots: list[Any] = []  # the models that they are of
        self.optimizers: list[Any] = []  # in the order in which they stepped

    def guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of this recorder; what fails in it is written, and not raised into the program."""
        if self.is_broken:
            return
        try:
            if os.getpid() != self.pid:
                self.begin()
            function(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the certificate names it
            self.is_broken = True
            self.write("broken", said=f"{type(error).__name__}: {error}")
        if self.is_ending:
            self.is_ending = False
            self.end()  # a handler of the program's own may raise, into the program

    def write(self, event: str, **facts: Any) -> None:
        if self.file < 0:
            path = Path(self.records, f"{self.pid}.jsonl")
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        rank, world = self.rank()
        line = {"event": event, "rank": rank, "world": world, "step": self.step, **facts}
        os.write(self.file, json.dumps(line).encode() + b"\n")  # at once: the process may be ended

    @staticmethod
    def rank() -> tuple[int, int]:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    # -- What the model gets

    def open_calls(self) -> list[list[tuple[Any, Any]]]:
        """Return the calls of modules that this thread is in, each with what the calls within it got."""
        if not hasattr(self.calls, "open"):
            self.calls.open = []
        found: list[list[tuple[Any, Any]]] = self.calls.open
        return found

    def enter(self) -> None:
        self.open_calls().append([])

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Keep the rows of a batch, where a model that is trained was called from outside.

        A wrapper may get no tensors, as one that runs a whole step: then what it calls with all of its
        parameters is the model.
        """
        calls = self.open_calls()
        within = calls.pop() if calls else []
        own = _batch_of(module, (args, kwargs))
        if own is not None:
            got = [(module, own)]
        else:
            trained = _trained_in(module)
            got = [(inner, tensor) for inner, tensor in within if trained <= _trained_in(inner)]
        if calls:
            calls[-1] += got
            return
        for model, tensor in got:
            if _trained_in(model):  # others are a loss or a metric
                whole = tensor.detach().cpu()
                self.rows += [_digest(_bytes_of(row)) for row in whole]

    # -- What a step has changed

    def before_step(self, optimizer: Any) -> None:
        known = any(one is optimizer for one in self.optimizers)
        if not known:
            self.optimizers.append(optimizer)
        if self.step == 0:
            self.write("begin", weights=self.weights(buffers=False), states=self.states())

    def after_step(self, _: Any) -> None:
        self.step += 1
        self.moments = 0
        self.open_calls().clear()
        self.write(
            "step",
            rows=self.rows,
            weights=self.weights(buffers=True),
            states=self.states(),
            settings=self.settings(),
            random=_random_numbers(),
        )
        self.rows = []
        self.is_ending = self.kill.get("step") == self.step and "moment" not in self.kill

    def parameters(self) -> Iterator[Any]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def find_models(self) -> None:
        """Find the models of all parameters, among all objects: a program may keep them anywhere."""
        import torch

        if all(id(parameter) in self.names for parameter in self.parameters()):
            return
        modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        inner = {id(child) for module in modules for child in module._modules.values()}
        trained = {id(parameter) for parameter in self.parameters()}
        roots = []
        for module in modules:
            if id(module) in inner:
                continue
            own = {id(parameter) for parameter in module.parameters()}
            if own & trained:
                roots.append((len(own), module))
        roots.sort(key=lambda one: -one[0])  # a part that is kept elsewhere, too, gets the whole's names
        self.names, self.roots = {}, []
        for _, root in roots:
            if all(id(parameter) in self.names for parameter in root.parameters()):
                continue
            prefix = f"{type(root).__name__}." if self.roots else ""
            for name, parameter in root.named_parameters():
                plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
                self.names.setdefault(id(parameter), prefix + plain)
            self.roots.append(root)
        for number, parameter in enumerate(self.parameters()):
            self.names.setdefault(id(parameter), f"parameter {number}")

    def weights(self, *, buffers: bool) -> dict[str, Any]:
        self.find_models()
        found = {self.names[id(parameter)]: _short(parameter) for parameter in self.parameters()}
        for root in self.roots:
            for parameter in root.parameters():
                name = self.names[id(parameter)]
                if name not in found:  # it is frozen
                    found[name] = _short(parameter)
            if not buffers:  # the forward pass may have changed them
                continue
            for name, buffer in root.named_buffers():
                plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
                found[plain] = _short(buffer)
        return found

    def states(self) -> dict[str, Any]:
        self.find_models()
        found = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                if not isinstance(state, Mapping):
                    continue
                for key, value in state.items():
                    short = _short(value)
                    if short is not None:
                        found[f"{self.names.get(id(parameter), '')} {key}".strip()] = short
        return found

    def settings(self) -> dict[str, Any]:
        found = {}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    short = _short(value)
                    if short is not None:
                        found[f"{key} of {type(optimizer).__name__}'s group {number}"] = short
        return found

    # -- What is written to the folder, and the end

    def changed(self, what: str, path: Any) -> None:
        """Note a moment of a save: before a file is opened, renamed or removed, or with half of it."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - not each path's links
        if not place.startswith(self.folder + os.sep):
            return
        name = place[len(self.folder) + 1 :]
        is_half = not what
        if is_half:
            said = f"with half of {name}"
        else:
            said = f"before {name} {what}"
        self.write("moment", number=self.moments, what=said, is_half=is_half)
        is_last = self.kill.get("step") == self.step and self.kill.get("moment") == self.moments
        self.moments += 1
        if is_last and is_half and self.rank()[0] == 0 and self.kill["signal"] == signal.SIGKILL:
            os.truncate(place, os.path.getsize(place) // 2)  # noqa: PTH202 - as above
        self.is_ending |= is_last  # after the cut, which is a change, too

    def end(self) -> None:
        if self.rank()[0] != 0:
            return
        self.kill, number = {}, self.kill["signal"]
        self.write("end")
        if number == signal.SIGKILL:
            end_all(self.records)
        else:
            # To what was started alone, as a cluster does: a launcher passes it on.
            os.kill(int(Path(self.records, PID).read_text()), number)


def _random_numbers() -> dict[str, str]:
    """Return digests of the states of all generators that a program has without asking."""
    import torch

    found = {
        "torch": _digest(_bytes_of(torch.get_rng_state())),
        "random": _digest(repr(random.getstate()).encode()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *others = numpy.random.get_state()
        found["numpy"] = _digest(repr((name, keys.tolist(), others)).encode())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return found
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", module.is_available)():
        return found  # nothing was drawn there, and to ask would take memory of it
    count = torch.accelerator.device_count()
    states = [module.get_rng_state()]  # the only device of some types takes no index
    if count > 1:
        states = [module.get_rng_state(number) for number in range(count)]
    for number, state in enumerate(states):
        found[f"{accelerator.type}:{number}"] = _digest(_bytes_of(state))
    return found


# -- Joining a program ------------------------------------------------------------------------------------


def _watch_torch(recorder: _Recorder) -> None:
    import torch
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    def enter(*_: Any) -> None:
        recorder.guarded(recorder.enter)

    def leave(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
        # After an error torch calls it without keywords.
        recorder.guarded(recorder.leave, module, args, rest[0] if len(rest) == 2 else {})

    def before(optimizer: Any, *_: Any) -> None:
        recorder.guarded(recorder.before_step, optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        recorder.guarded(recorder.after_step, optimizer)

    modules.register_module_forward_pre_hook(enter)
    modules.register_module_forward_hook(leave, with_kwargs=True, always_call=True)
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    torch.save = _saving(torch.save, recorder)


def _watch_safetensors(recorder: _Recorder) -> None:
    # Before safetensors.torch takes it by name; it writes without Python.
    safetensors: Any = sys.modules["safetensors"]
    safetensors.serialize_file = _saving(safetensors.serialize_file, recorder)


def _saving(function: Callable[..., Any], recorder: _Recorder) -> Callable[..., Any]:
    """Return a function that writes its second argument, a file or its path, with a moment for half of it."""

    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        done = function(*args, **kwargs)
        if len(args) > 1:
            target = args[1]
        else:
            target = kwargs.get("f", kwargs.get("filename"))
        if target is not None and hasattr(target, "write"):
            with suppress(Exception):  # not all have a buffer
                target.flush()
            target = getattr(target, "name", None)
        recorder.guarded(recorder.changed, "", target)
        return done

    return save


class _Finder:
    """Calls a function when the program has imported a module."""

    def __init__(self, watched: dict[str, Callable[[], None]]) -> None:
        self.watched = watched

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        watch = self.watched.pop(name, None)
        if watch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            execute(module)
            watch()

        spec.loader.exec_module = run  # type: ignore[method-assign]  # of this one loader
        return spec


def _audit(recorder: _Recorder) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            if isinstance(mode, str):
                is_written = not {"w", "a", "x", "+"}.isdisjoint(mode)
            else:
                is_written = bool(flags & writes)
            if is_written:
                recorder.guarded(recorder.changed, "is opened", path)
        elif event in _CHANGES:
            moved = event in ("os.rename", "os.link", "os.symlink")
            recorder.guarded(recorder.changed, _CHANGES[event], args[1] if moved else args[0])

    return hook


def _join(settings: dict[str, Any]) -> None:
    recorder = _Recorder(settings)
    watched = {
        "torch": lambda: _watch_torch(recorder),
        "safetensors": lambda: _watch_safetensors(recorder),
    }
    sys.meta_path.insert(0, _Finder(watched))
    sys.addaudithook(_audit(recorder))


def _import_next() -> None:
    """Import the ``sitecustomize`` that this one hides, where the environment has one."""
    own = str(Path(__file__).parent)
    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [path for path in sys.path if path != own]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if VARIABLE in os.environ and __name__ == "sitecustomize":
    _join(json.loads(os.environ[VARIABLE]))
    _import_next()
