"""Opening a pool of workers on an engine, ours or a stranger's."""

from collections.abc import Mapping
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._fleet import Fleet
from tp_runner._foreign import ForeignPool
from tp_runner._options import make_settings
from tp_runner._pool import RunnerPool
from tp_runner._settings import Settings

__all__ = ["OWN_ENGINES", "Opener", "open_own"]

OWN_ENGINES = ("inline", "process", "ray", "thread")


class Opener:
    """Everything that is needed to open a pool, checked.

    The engines of this package are opened without asking the registry, which would import torch;
    the registry gives the very same ones.
    """

    def __init__(
        self, engine: str, program: Any, devices: tuple[str, ...], options: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._program = program
        self._devices = devices
        self._options = options
        self._settings: Settings | None = None
        if engine in OWN_ENGINES:
            self._settings = make_settings(engine, len(devices), options)
        else:
            self._foreign = _find_engine(engine)

    def open(self) -> Any:
        """Start the workers."""
        if self._settings is not None:
            return open_own(self._engine, self._program, self._devices, self._settings)
        import torch

        devices = [torch.device(device) for device in self._devices]
        given = {name: value for name, value in self._options.items() if value is not None}
        ordered = given.pop("ordered", True)
        pool = self._foreign.open(self._program, devices, options=given)
        return ForeignPool(pool, self._engine, ordered=ordered)


def open_own(engine: str, program: Any, devices: tuple[str, ...], settings: Settings) -> RunnerPool:
    """Start workers on an engine of this package."""
    fleet: Fleet
    if engine == "process":
        _require_forkable(devices, settings)
        from tp_runner._process import ProcessFleet

        fleet = ProcessFleet(program, devices, settings)
    elif engine == "thread":
        from tp_runner._thread import ThreadFleet

        fleet = ThreadFleet(program, devices, settings)
    elif engine == "inline":
        from tp_runner._inline import InlineFleet

        fleet = InlineFleet(program, devices, settings)
    else:
        from tp_runner._ray import RayFleet

        fleet = RayFleet(program, devices, settings)
    return RunnerPool(fleet, settings)


def _require_forkable(devices: tuple[str, ...], settings: Settings) -> None:
    if settings.start_method == "fork" and any(device.startswith("cuda") for device in devices):
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type for it
            msg = (
                "start_method='fork' with CUDA devices needs a parent that has not used CUDA, and "
                "this one has; take 'forkserver' or 'spawn'"
            )
            raise ConfigError(msg)


def _find_engine(name: str) -> Any:
    from tp_core.plugins import registry

    for contribution in registry.engines():
        if contribution.item.name == name:
            return contribution.item
    registry.require(name)
    known = ", ".join(repr(contribution.item.name) for contribution in registry.engines())
    msg = f"no engine is called {name!r}; installed: {known or 'none'}"
    raise ConfigError(msg)
