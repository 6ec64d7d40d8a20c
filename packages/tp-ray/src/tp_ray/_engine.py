"""The engine `ray`: actors on a Ray cluster, one for each device."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core.plugins import Verdict
from tp_runner.engines import Fleet, FleetEngine, Settings

if TYPE_CHECKING:  # runners on the CPU need no torch
    import torch


class RayEngine(FleetEngine):
    """The engine of actors on a Ray cluster.

    Example:
        >>> from tp_core.plugins import registry
        >>> [found.item for found in registry.engines() if found.item.name == "ray"]
        [<tp_ray._engine.RayEngine object at ...>]
    """

    name = "ray"
    score = 20
    summary = "one actor on a Ray cluster for each device"
    unfit: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_items_per_worker", "max_memory_per_worker"), "only processes are replaced"),
        **dict.fromkeys(("preload", "start_method"), "Ray starts the workers"),
        "cpus": "Ray places the workers; resources={'num_cpus': 2} says how many cores one takes",
    }
    is_remote = True
    copies_work = True
    start_timeout_s = None  # an actor may wait for its place for any time

    def assess(self, devices: "Sequence[torch.device]") -> Verdict:
        """Fit where Ray is installed; never better than processes for one machine."""
        if importlib.util.find_spec("ray") is None:
            return Verdict.unfit("ray is not installed", remedy="pip install tp-ray")
        return super().assess(devices)

    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        from tp_ray._fleet import RayFleet

        return RayFleet(program, devices, settings)
