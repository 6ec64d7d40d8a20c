"""The wrapper that splits whole batches and gathers outputs; its steps as functions of torch's names."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from tp_core import DeviceSpec, device_of, resolve_devices, to_device, tree_leaves
from tp_core.arguments import as_names, explain_arguments
from tp_core.data import Scattering
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas, ReplicaWrapper, untraced

from tp_dp_gather._gather import Gathering, sorted_by_device
from tp_dp_gather._loss import Criterion, parallel_loss

Device = int | str | torch.device
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")

_DEFAULTS = {"cpu_keywords": [], "minibatch": False, "batch_outputs": True}
_SUCCESSORS = {
    "cpu_keywords": "everything is moved; keep it in an object without a .to method, or let forward move it",
    "minibatch": "pass inputs_are_scattered=True, which takes one batch per device",
    "gather": "pass gather_to_one_device=..., which says whether outputs meet on one device",
    "batch_outputs": "pass gather_to_one_device=False, which returns one output per device",
}
"""Options of others: the defaults of the DataParallel that this one follows, and what to pass instead."""


class DataParallel(ReplicaWrapper):
    """Wrapper that splits a batch over the devices, runs the module on each, and gathers the outputs.

    Parts come in the order of ``device_ids``. Tensors are concatenated, scalars stacked to a
    vector, anything else becomes a list of the parts' values. A batch with fewer rows than devices
    uses the first ones. You can chain wrappers: one takes the outputs that another leaves in parts.

    Args:
        module: The module. It must be on the first device when it runs; with one device it is moved
            there. Optimizers that were made before keep working.
        device_ids: ``[0, 1]``, ``["cuda:0", "cpu"]``, ``["cpu", "cpu"]``, or whatever else
            `tp_core.resolve_devices` takes; every accelerator by default, or the CPU where there is none.
        output_device: Where outputs are gathered; the first device by default.
        dim: The dimension of the rows, in inputs and outputs; at least 0.
        gather_to_one_device: ``False`` returns a tuple with each part's output, on its device.
        inputs_are_scattered: Each argument is a tuple or list with one part per device already.
        except_keywords: Keys, at any depth of dicts, named tuples and dataclasses. Their values are not
            gathered: they become tuples of parts.
        sort_and_gather: Order the parts by their devices' indices instead of ``device_ids``.
        samples: What has an entry for each row, as a list of texts may, and is split like tensors. Names of
            the module's parameters, places of positional arguments, or keys at any depth; several keys with
            dots between them are a path: ``"targets.names"``.
        broadcast: What each device gets whole, named in the same way: tensors with other rows, and lists that
            are as long as the batch without an entry for each row. A list that is as long, holds more than
            tensors, and is named in neither is refused.

    Attributes:
        module: The module.
        device_ids: The devices.

    Raises:
        DeviceError: ``device_ids`` or ``output_device`` names a device that this process does not have.
        ConfigError: An option is unknown, or options contradict each other.

    Example:
        >>> net = DataParallel(nn.Linear(5, 2), ["cpu", "cpu"], gather_to_one_device=False)
        >>> [tuple(part.shape) for part in net(torch.ones(16, 5))]
        [(8, 2), (8, 2)]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceSpec = None,
        output_device: Device | None = None,
        dim: int = 0,
        gather_to_one_device: bool = True,
        inputs_are_scattered: bool = False,
        except_keywords: Collection[str] | str = (),
        sort_and_gather: bool = False,
        *,
        samples: Collection[str | int] | str = (),
        broadcast: Collection[str | int] | str = (),
        **upstream: Any,
    ) -> None:
        self._refuse({k: v for k, v in upstream.items() if v != _DEFAULTS.get(k, ...)}, _SUCCESSORS)
        truths = {
            "gather_to_one_device": gather_to_one_device,
            "inputs_are_scattered": inputs_are_scattered,
            "sort_and_gather": sort_and_gather,
        }
        for option, value in truths.items():
            if not isinstance(value, bool):
                msg = f"{option} must be True or False, got {value!r:.80}; give options by name"
                raise ConfigError(msg)
        if not isinstance(dim, int) or dim < 0:
            msg = f"dim must be at least 0, got {dim!r}; it is the dimension of the rows"
            raise ConfigError(msg)
        keywords = as_names("except_keywords", except_keywords)
        if not gather_to_one_device and keywords:
            msg = (
                f"except_keywords={list(keywords)!r} leaves some of the output in parts, and "
                "gather_to_one_device=False leaves all of it; give one of the two"
            )
            raise ConfigError(msg)
        super().__init__(module, device_ids, output_device)
        self.dim = dim
        self.gather_to_one_device = gather_to_one_device
        self.inputs_are_scattered = inputs_are_scattered
        self.except_keywords = frozenset(keywords)
        self.sort_and_gather = sort_and_gather
        self.scattering = Scattering.by_names(samples, broadcast, dim=dim)
        self._unseen = set(keywords)
        self._criterion: Replicas | None = None
        self._recorded: list[Sequence[Any]] | None = None
        # Of these, the outputs of calls whose inputs are in no graph: all below them is the module's own.
        self.first_outputs: list[Sequence[Any]] = []

    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on every part of the inputs.

        Collectives: forward scatters the inputs, copies changed parameters to the other devices, and
        gathers the outputs; backward scatters the outputs' gradients, and sums the replicas' gradients
        into the module's.

        Raises:
            ConfigError: The inputs cannot be split, or the outputs not be gathered.
            ModelError: The module cannot be replicated as it is, or is not on the first device.
        """
        most = len(self.device_ids)
        sizes: list[int] | None = None
        if self.inputs_are_scattered:
            arguments = _split_scattered(inputs, kwargs, most=most)
        elif self._overrides(DataParallel, "scatter"):
            arguments = self._check_scattered(*self.scatter(inputs, kwargs, self.device_ids))
        else:
            arguments, sizes = self._scatter(inputs, kwargs, self.module.forward)
        with self._computing_parts(len(arguments)):
            outputs = self._run(arguments)
        if self._recorded is not None:
            self._recorded.append(outputs)
            self._note_first(outputs, (inputs, kwargs))
        if self.sort_and_gather:
            outputs = sorted_by_device(outputs, self.device_ids)
            sizes = sizes and sorted_by_device(sizes, self.device_ids)
        if not self.gather_to_one_device:
            return tuple(outputs)
        if self._overrides(DataParallel, "gather"):
            # One device as in nn.DataParallel, for which such methods are written.
            if most == 1:
                return outputs[0]
            return self.gather(outputs, self.output_device)
        return self._gather(outputs, self.output_device, sizes)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that the wrapper lacks.

        A method of the module runs like forward: on the parts of its arguments, with gathered outputs.
        Without tensors it runs once.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            # `_orig_mod` is torch.compile's (private): its wrapper would lend names of its own.
            module = getattr(module, "_orig_mod", module)
            if module is None or not hasattr(module, name):
                raise
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module:
            return partial(self._call_method, name)
        return value

    def __getitem__(self, key: Any) -> Any:
        """Return an item of a module that has items: a part of it, which runs on the whole of its inputs."""
        module: Any = self.module
        return module[key]

    def _call_method(self, name: str, *inputs: Any, **kwargs: Any) -> Any:
        method = getattr(self.module, name)
        arguments, sizes = self._scatter(inputs, kwargs, method)
        if sizes is None and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((inputs, kwargs))):
            return method(*inputs, **kwargs)
        devices = self.replicas.devices

        def call(replica: nn.Module, part: Any) -> Any:
            (args, keywords), device = part
            moved, named = to_device((args, keywords), device)
            return getattr(replica, name)(*moved, **named)

        with self._computing_parts(len(arguments)):
            outputs = self.replicas.run(call, list(zip(arguments, devices, strict=False)))
        if self._recorded is not None:
            self._note_first(outputs, (inputs, kwargs))
        if self._overrides(DataParallel, "gather"):
            return self.gather(outputs, self.output_device)
        return self._gather(outputs, self.output_device, sizes)

    def _scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any]
    ) -> tuple[list[Arguments], list[int] | None]:
        return self.scattering.arguments(inputs, kwargs, most=len(self.device_ids), function=function)

    def _computing_parts(self, count: int) -> AbstractContextManager[None]:
        batches = self.scattering.loaded
        if batches is None or count < 2:
            return nullcontext()
        return batches.computing_part("within the model's forward")

    @contextmanager
    def recorded(self) -> Iterator[list[Sequence[Any]]]:
        """Collect the parts' outputs of each forward in the block, before they are gathered."""
        calls: list[Sequence[Any]] = []
        self._recorded = calls
        self.first_outputs = []
        try:
            yield calls
        finally:
            self._recorded = None

    def _note_first(self, outputs: Sequence[Any], arguments: Any) -> None:
        leaves = tree_leaves(arguments)
        if len(outputs) > 1 and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            self.first_outputs.append(outputs)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device_ids: Sequence[Device]
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
        """Split arguments into those of each part, and move them to the devices.

        An override of this method is called before each forward, unless the inputs are scattered.

        Collectives: forward copies the parts to their devices; backward gathers the inputs' gradients.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments.
            device_ids: The devices; there are at most as many parts.

        Returns:
            The positional arguments of each part, and the keyword arguments of each.

        Raises:
            ConfigError: Tensors have different numbers of rows, or something else is as long.
        """
        devices = resolve_devices(device_ids)
        parts, _ = self.scattering.arguments(
            tuple(inputs), dict(kwargs or {}), most=len(devices), function=self.module.forward
        )
        moved = [to_device(part, device) for part, device in zip(parts, devices, strict=False)]
        return tuple([args for args, _ in moved]), tuple([kwargs for _, kwargs in moved])

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Join the parts' outputs to one output.

        An override of this method is called after each forward, unless the outputs stay in parts.

        Collectives: forward gathers the parts; backward scatters the output's gradient to them.

        Args:
            outputs: The parts' outputs.
            output_device: Where to; -1 is the CPU.

        Raises:
            ConfigError: ``outputs`` is empty, or its elements differ in structure.
        """
        return self._gather(outputs, output_device, None)

    def _gather(self, outputs: Sequence[Any], output_device: Device, sizes: Sequence[int] | None) -> Any:
        gathering = Gathering(self._device_of(output_device), self.dim, self.except_keywords, sizes)
        result = gathering.gather(outputs)
        if self._unseen:
            self._warn_of_unseen(gathering.keys)
        return result

    def apply_loss(
        self, criterion: Criterion, outputs: Sequence[Any], targets: Any, *, reduction: str | None = None
    ) -> Tensor:
        """Return the loss of outputs that were left in parts, computed where each part is.

        The same as ``criterion(whole output, targets)``, but only numbers travel to the output
        device.

        Collectives: forward scatters the targets and gathers the parts' losses; backward scatters the
        loss's gradient to the parts.

        Args:
            criterion: A loss module or function of an output and a target. Means of
                ``CrossEntropyLoss`` and ``NLLLoss``, their functions, and ``functools.partial`` of
                those apply weights and ``ignore_index`` over the whole batch; all others are
                weighted by rows.
            outputs: The parts of the output, each on its device, with its rows in ``dim``.
            targets: The whole target, or its parts.
            reduction: "mean" or "sum", for functions and modules that have neither a ``.reduction`` nor a
                parameter of that name. A criterion with the reduction "none" gives the whole vector.

        Raises:
            ConfigError: The outputs are not parts, the targets do not match them, or the
                criterion's reduction is not known or not what it returns.

        Example:
            >>> net = DataParallel(nn.Linear(5, 2), ["cpu", "cpu"], gather_to_one_device=False)
            >>> y = torch.zeros(16, dtype=torch.long)
            >>> net.apply_loss(nn.CrossEntropyLoss(), net(torch.ones(16, 5)), y).dim()
            0
        """
        if reduction not in {None, "mean", "sum"}:
            msg = f"reduction must be 'mean', 'sum' or None for the criterion's own, got {reduction!r}"
            raise ConfigError(msg)
        return parallel_loss(
            criterion,
            outputs,
            targets,
            replicas=self._replicas_of(criterion),
            device=self.output_device,
            scattering=replace(self.scattering, loaded=None, backend=""),
            reduction=reduction,
        )

    def _check_scattered(
        self, inputs: Sequence[Any], kwargs: Sequence[Mapping[str, Any]] | None
    ) -> list[Arguments]:
        if not inputs and not kwargs:
            return [((), {})]
        pairs = self._pair_up(inputs, kwargs)
        if not 0 < len(pairs) <= len(self.device_ids):
            msg = f"scatter must return 1 to {len(self.device_ids)} parts, one per device, got {len(pairs)}"
            raise ConfigError(msg)
        return [(tuple(args), dict(keywords)) for args, keywords in pairs]

    def _replicas_of(self, criterion: Criterion) -> Replicas:
        """Return the replicas that compute a criterion: its own, if it has parameters or buffers."""
        if not isinstance(criterion, nn.Module) or not (
            any(True for _ in criterion.parameters()) or any(True for _ in criterion.buffers())
        ):
            return self.replicas  # only their threads are needed
        if self._criterion is None or self._criterion.module is not criterion:
            devices = self.replicas.devices
            self._criterion = Replicas(criterion.to(devices[0]), list(devices))
        return self._criterion

    def _warn_of_unseen(self, keys: set[str]) -> None:
        missing = sorted(self._unseen - keys)
        self._unseen.clear()
        if missing:
            warnings.warn(
                f"except_keywords names {', '.join(map(repr, missing))}, and no output has such a key; "
                f"the keys are: {', '.join(map(repr, sorted(keys))) or 'none'}",
                stacklevel=4,
            )


def _split_scattered(args: tuple[Any, ...], kwargs: dict[str, Any], *, most: int) -> list[Arguments]:
    """Turn arguments that are tuples of parts into the arguments of each part.

    Arguments that are neither tensors nor tuples nor lists (flags, numbers, ``None``) go to every
    part.
    """
    named = [
        *((f"argument {i}", a) for i, a in enumerate(args)),
        *((f"argument {k!r}", a) for k, a in kwargs.items()),
    ]
    count: int | None = None
    for name, arg in named:
        if isinstance(arg, Tensor | PackedSequence):
            if isinstance(arg, Tensor):
                kind = f"tensor of shape {tuple(arg.shape)}"
            else:
                kind = "PackedSequence"
            msg = (
                f"with inputs_are_scattered=True {name} must be a tuple or list with one part per device, "
                f"got a {kind}"
            )
            raise ConfigError(msg)
        if not isinstance(arg, tuple | list):
            continue
        if count is not None and len(arg) != count:
            msg = f"{name} must have {count} parts like the arguments before it, got {len(arg)}"
            raise ConfigError(msg)
        count = len(arg)
        if not 0 < count <= most:
            msg = f"{name} must have 1 to {most} parts, one per device, got {count}"
            raise ConfigError(msg)

    def part(arg: Any, i: int) -> Any:
        if isinstance(arg, tuple | list):
            return arg[i]
        return arg

    return [
        (tuple(part(a, i) for a in args), {k: part(a, i) for k, a in kwargs.items()})
        for i in range(count or 1)
    ]


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: DeviceSpec = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    gather_to_one_device: bool = True,
    inputs_are_scattered: bool = False,
    except_keywords: Collection[str] | str = (),
    sort_and_gather: bool = False,
    samples: Collection[str | int] | str = (),
    broadcast: Collection[str | int] | str = (),
) -> Any:
    """Run ``module`` once on several devices: the functional form of `DataParallel`.

    Every call makes new replicas; in a loop, `DataParallel` keeps them.

    Collectives: as in the forward of `DataParallel`.

    Args:
        module: The module, on the first device.
        inputs: A tuple of positional arguments, or the one argument; ``None`` for none. The tensors in them
            have the whole batch's rows in ``dim``.
        device_ids: As in `DataParallel`, like the other options.
        output_device: Where outputs are gathered.
        dim: The dimension of the rows.
        module_kwargs: Keyword arguments.
        gather_to_one_device: ``False`` returns a tuple of parts.
        inputs_are_scattered: Each argument is a tuple or list of parts.
        except_keywords: Keys of values that are not gathered.
        sort_and_gather: Order the parts by their devices' indices.
        samples: What has an entry for each row.
        broadcast: What each device gets whole.

    Returns:
        The outputs, joined along ``dim`` on ``output_device``; or a tuple with each part's output, on its
        device.

    Raises:
        ConfigError: Options contradict each other, or inputs cannot be split or outputs not be gathered.
        DeviceError: ``device_ids`` or ``output_device`` names a device that this process does not have.
        ModelError: The module cannot be replicated as it is.

    Example:
        >>> data_parallel(nn.Linear(5, 2), torch.ones(16, 5), ["cpu", "cpu"]).shape
        torch.Size([16, 2])
    """
    wrapped = DataParallel(
        module,
        device_ids,
        output_device,
        dim,
        gather_to_one_device=gather_to_one_device,
        inputs_are_scattered=inputs_are_scattered,
        except_keywords=except_keywords,
        sort_and_gather=sort_and_gather,
        samples=samples,
        broadcast=broadcast,
    )
    if inputs is None:
        inputs = ()
    elif not isinstance(inputs, tuple) or isinstance(inputs, PackedSequence):  # a tuple by inheritance
        inputs = (inputs,)
    return wrapped(*inputs, **(module_kwargs or {}))


def scatter(
    inputs: Any,
    target_devices: DeviceSpec,
    dim: int = 0,
    *,
    samples: Collection[str | int] | str = (),
    broadcast: Collection[str | int] | str = (),
) -> tuple[Any, ...]:
    """Split the rows of all tensors in ``inputs``, one piece for each device, and move the pieces there.

    Fewer rows than devices make fewer pieces; what has no rows is in each of them.

    Collectives: forward copies the pieces to their devices; backward gathers the inputs' gradients.

    Args:
        inputs: A tensor, or anything around tensors.
        target_devices: The devices, as `tp_core.resolve_devices` takes them.
        dim: The dimension of the rows.
        samples: What has an entry for each row: keys at any depth, or paths of keys.
        broadcast: What each piece has whole.

    Returns:
        A tuple of pieces like ``inputs``, at most one for each device; their numbers of rows differ by at
        most one, larger ones first.

    Raises:
        ConfigError: Tensors have different numbers of rows, or something else is as long.
        DeviceError: ``target_devices`` names a device that this process does not have.

    Example:
        >>> [tuple(piece.shape) for piece in scatter(torch.ones(5, 2), ["cpu", "cpu"])]
        [(3, 2), (2, 2)]
    """
    devices = resolve_devices(target_devices)
    scattering = Scattering.by_names(samples, broadcast, dim=dim)
    pieces, _ = scattering.arguments((), {"inputs": inputs}, most=len(devices))
    return tuple(
        [to_device(kwargs["inputs"], device) for (_, kwargs), device in zip(pieces, devices, strict=False)]
    )


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the parts' outputs to one output on ``target_device``.

    Collectives: forward gathers the parts; backward scatters the output's gradient to them.

    Args:
        outputs: The parts' outputs, of one structure; tensors have the same shape but for ``dim``.
        target_device: Where to; -1 is the CPU.
        dim: The dimension to concatenate along; scalars become a vector.

    Raises:
        ConfigError: ``outputs`` is empty, or its elements differ in structure.

    Example:
        >>> gather([torch.ones(2, 3), torch.ones(1, 3)], "cpu").shape
        torch.Size([3, 3])
    """
    return Gathering(ReplicaWrapper._device_of(target_device), dim, ()).gather(outputs)


@explain_arguments("replicate(network, devices)")
def replicate(network: nn.Module, devices: DeviceSpec, detach: bool = False) -> list[nn.Module]:
    """Return replicas of ``network``: on the first device, where it must be, the module itself.

    Collectives: forward broadcasts the parameters; backward sums the replicas' gradients into the module's,
    unless ``detach``.

    Args:
        network: The module.
        devices: One device per replica.
        detach: If ``True``, gradients stay in the replicas and do not reach the module.

    Raises:
        ModelError: The module cannot be replicated as it is.
        DeviceError: ``devices`` names a device that this process does not have.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        return Replicas(network, devices).modules()


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: DeviceSpec = None,
) -> list[Any]:
    """Return ``module(*args, **kwargs)`` for each module, each in a thread of its own, all at once.

    Args:
        modules: The modules.
        inputs: For each its positional arguments, or the only one; they are not moved.
        kwargs_tup: For each its keyword arguments.
        devices: The device of each; by default its inputs' device.

    Raises:
        ConfigError: There are not as many inputs or devices as modules.
        DeviceError: ``devices`` names a device that this process does not have.
        Exception: Whatever a module raised.

    Example:
        >>> parallel_apply([abs, len], [(-3,), ("four",)])
        [3, 4]
    """
    pairs = ReplicaWrapper._pair_up(inputs, kwargs_tup)
    where = [device_of(pair) for pair in pairs] if devices is None else resolve_devices(devices)
    if not len(modules) == len(pairs) == len(where):
        msg = f"{len(modules)} modules need as many inputs and devices, got {len(pairs)} and {len(where)}"
        raise ConfigError(msg)
    threads = Replicas(nn.Identity(), list(where))
    numbered = list(zip(modules, pairs, strict=True))
    return threads.run(lambda _, call: call[0](*call[1][0], **call[1][1]), numbered)


def sort_by_device(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parts in the order of the devices that they are on, by type and index.

    Example:
        >>> sort_by_device([torch.ones(1), torch.zeros(2)])
        (tensor([1.]), tensor([0., 0.]))
    """
    return tuple(sorted_by_device(outputs, [device_of(output) for output in outputs]))
