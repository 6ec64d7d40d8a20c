"""Where actors go: the resources that each takes, the room that a cluster has, a placement group."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tp_core.device_types import is_counted_by_ray
from tp_core.errors import ConfigError
from tp_runner.engines import HASH_SEED

Needs = dict[str, float]


def needs_of(device: str, resources: Mapping[str, float]) -> Needs:
    """Return the resources that a worker takes of its node, by Ray's names."""
    needs = {"CPU": 1.0, "GPU": float(is_counted_by_ray(device.partition(":")[0]))}
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return needs | {names.get(name, name): n for name, n in resources.items()}


def actor_options(
    ray: Any, needs: Needs, group: Any, index: int, env: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return Ray's options of an actor: its resources, its place in a group, its environment."""
    rest = {name: n for name, n in needs.items() if name not in {"CPU", "GPU", "memory"}}
    options: dict[str, Any] = {
        "num_cpus": needs["CPU"],
        "num_gpus": needs["GPU"],
        "memory": needs.get("memory"),
        "resources": rest,
    }
    if group is not None:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options["scheduling_strategy"] = strategy(group, placement_group_bundle_index=index)
    # An interpreter reads its hash seed at its start. The program's own seed, if it has one, is before ours.
    variables = {name: os.environ.get(name, value) for name, value in HASH_SEED.items()}
    variables |= {name: value for name, value in env.items() if value is not None}
    options["runtime_env"] = {"env_vars": variables}  # prepare_process removes variables that are None
    return options


def require_room(nodes: Sequence[dict[str, Any]], workers: Sequence[Needs], placement: str | None) -> None:
    """Check that the living nodes of a cluster, if nobody else used them, could hold all workers.

    An actor that fits nowhere would be waited for without an end.
    """
    left = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    if placement == "strict_pack":
        tried = [_count_placed([node], workers) for node in left or [{}]]
        n_placed, needs = max(tried, key=lambda attempt: attempt[0])
    else:
        n_placed, needs = _count_placed(left, workers, once=placement == "strict_spread")
    if n_placed < len(workers):
        wanted = ", ".join(f"{k:g} {name}" for name, k in needs.items() if k)
        how = f" placed by {placement!r}" if placement else ""
        msg = (
            f"the cluster has room for {n_placed} of {len(workers)} actors{how}, and none for another one "
            f"with {wanted}; ask for fewer devices or other resources=, or add nodes first"
        )
        raise ConfigError(msg)


def _count_placed(nodes: list[Needs], workers: Sequence[Needs], *, once: bool = False) -> tuple[int, Needs]:
    """Return how many workers find a place, and the resources of the first that finds none."""
    left = [dict(node) for node in nodes]
    for n_placed, needs in enumerate(workers):
        node = next((n for n in left if all(n.get(name, 0.0) >= k for name, k in needs.items())), None)
        if node is None:
            return n_placed, needs
        for name, k in needs.items():
            node[name] = node.get(name, 0.0) - k
        if once:
            left.remove(node)
    return len(workers), {}


def reserve(ray: Any, workers: Sequence[Needs], placement: str, timeout_s: float | None) -> Any:
    """Hold a place for every worker: a placement group, which Ray moves when a node is lost."""
    bundles = [{name: k for name, k in needs.items() if k} for needs in workers]
    if not all(bundles):
        msg = f"placement={placement!r} holds what workers take, and resources= lets one take nothing"
        raise ConfigError(msg)
    group = ray.util.placement_group(bundles, strategy=placement.upper())
    began = time.monotonic()
    while not group.wait(1):  # in turns of a second, so that an interrupt is handled
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            ray.util.remove_placement_group(group)
            msg = (
                f"the cluster had no place for {len(bundles)} workers placed by {placement!r} after "
                f"start_timeout_s={timeout_s}; others may hold them"
            )
            raise ConfigError(msg)
    return group
