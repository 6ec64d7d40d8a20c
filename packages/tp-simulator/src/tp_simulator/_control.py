"""What a program is watched for, and what its devices are made to suffer."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Report:
    """What happened on all devices since :func:`watch` or :func:`hostile` began.

    Attributes:
        races: A sentence for each pair of accesses that nothing orders, for memory that was freed too early,
            and for memory of the host that was changed too early. Of a pair, it begins with the line at which
            the second was launched, where Python has one.
        synchronizations: How often the host waited for a device.
        kernels: How many kernels were launched.
        copies: How many copies there were, by kind.
    """

    def __init__(self) -> None:
        self._races = len(_native().races())
        self._counts: dict[str, int] = _native().counts()

    @property
    def races(self) -> tuple[str, ...]:
        """The accesses that nothing orders, in the order in which they were found."""
        return tuple(_native().races()[self._races :])

    @property
    def synchronizations(self) -> int:
        """How often the host waited for a device."""
        return self._since().get("synchronizations", 0)

    @property
    def kernels(self) -> int:
        """How many kernels were launched."""
        return self._since().get("kernels", 0)

    @property
    def copies(self) -> dict[str, int]:
        """How many copies there were, by kind."""
        return {name: n for name, n in self._since().items() if "copies" in name}

    def _since(self) -> dict[str, int]:
        counts: dict[str, int] = _native().counts()
        since = {name: n - self._counts.get(name, 0) for name, n in sorted(counts.items())}
        return {name: n for name, n in since.items() if n}

    def __str__(self) -> str:
        races = self.races
        lines = [f"{len(races)} race{'s' if len(races) != 1 else ''}", *(f"  {race}" for race in races)]
        return "\n".join([*lines, *(f"{n} {name}" for name, n in self._since().items())])


@contextlib.contextmanager
def watch() -> Iterator[Report]:
    """Report what the program does on the devices, from here to the end of the block.

    At its end the devices have done all that they were given.
    """
    report = Report()
    try:
        yield report
    finally:
        _native().finish()


@contextlib.contextmanager
def hostile(seed: int = 0) -> Iterator[Report]:
    """Have every device do its work as late as it legally may, and report what goes wrong.

    Kernels and copies wait in the queues of their streams until the host waits for them, or other work does
    that has to run. A copy that does not block leaves NaN (-1 in integers) in its target until then. With the
    right events and waits, a program gets the numbers that it always gets.

    Args:
        seed: With 0, everything is as late as it may be. Each other seed is another order that a card may
            choose: it lets some streams get ahead of others.

    Example:
        >>> with tp_simulator.hostile(seed=0) as report:
        ...     train("sim:0")
        >>> assert not report.races, report
    """
    native = _native()
    native.finish()  # what was launched before is no part of the order that the seed chooses
    before = native.seed()
    native.be_late(seed)
    try:
        with watch() as report:
            yield report
    finally:
        native.be_prompt() if before is None else native.be_late(before)


def limit_memory(nbytes: int, device: "int | str | torch.device | None" = None) -> None:
    """Let a device have this much memory, and raise ``torch.OutOfMemoryError`` beyond; it begins with 16 GiB.

    Memory is handed out by the rules of CUDA's allocator: in blocks of 512 bytes, from segments of 2 or 20
    MiB that belong to one stream each. What counts is the size of the segments.
    """
    _native().set_total_memory(_index(device), nbytes)


def fail_at_kernel(number: int, device: "int | str | torch.device | None" = None) -> None:
    """Let a device die at a kernel: the first one from now if ``number`` is 1.

    Whatever waits for it, or uses the device afterwards, raises ``torch.AcceleratorError``.

    Raises:
        ValueError: The number is less than 1.
    """
    if number < 1:
        msg = f"the first kernel from now has the number 1, so there is none of number {number}"
        raise ValueError(msg)
    _native().fail_at_kernel(_index(device), number)


def revive(device: "int | str | torch.device | None" = None) -> None:
    """Let a device that died work again, for which a card would need a new process. Its work is lost."""
    _native().revive(_index(device))


def _index(device: "int | str | torch.device | None") -> int:
    from tp_simulator._torch_sim import index_of

    return index_of(device)


def _native() -> Any:
    from tp_simulator._activation import number_of_devices
    from tp_simulator._build import extension

    if not number_of_devices():
        msg = "there are no simulated devices: call tp_simulator.activate(), or set SIM_DEVICES"
        raise RuntimeError(msg)
    return extension()
