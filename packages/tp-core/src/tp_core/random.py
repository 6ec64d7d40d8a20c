"""Random generators that are seeded by a key: a seed, an epoch and a rank, for example.

torch is imported where its generators are seeded: processes without torch compute seeds, too.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "capture_rng_state",
    "device_rng_state",
    "preserve_rng_state",
    "restore_rng_state",
    "seed_everything",
    "seed_generators",
    "seed_of",
    "seed_torch",
    "seeded",
    "set_device_rng_state",
]


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Run a block with Python's, numpy's (if loaded) and torch's CPU generators seeded by ``key``.

    Their states are restored afterwards.
    """
    with preserve_rng_state():
        seed_generators(key)
        yield


@contextmanager
def preserve_rng_state(devices: "Iterable[torch.device]" = ()) -> Iterator[None]:
    """Run a block, and restore the states of Python's, numpy's (if loaded) and torch's generators."""
    import torch

    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    device_states = [(device, device_rng_state(device)) for device in devices]
    with torch.random.fork_rng(()):
        try:
            yield
        finally:
            for device, state in device_states:
                set_device_rng_state(device, state)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def seeded_own(generator: "torch.Generator | None", *key: int) -> Iterator[None]:
    """Run a block with a user's generator seeded by ``key`` and its own initial seed.

    Its state is restored afterwards. The initial seed keeps two generators of one program different.
    """
    if generator is None:
        yield
        return
    state = generator.get_state()
    generator.manual_seed(seed_of((generator.initial_seed(), *key)))
    try:
        yield
    finally:
        generator.set_state(state)


def seed_generators(key: tuple[int, ...]) -> None:
    """Seed Python's, numpy's and torch's CPU generators, the latter two if they are loaded, by ``key``."""
    seed_everything(seed_of(key), devices=False)


def seed_everything(seed: int, *, devices: bool = True, load: bool = True) -> None:
    """Seed Python's generator, and numpy's and torch's if they are loaded.

    Args:
        seed: The seed.
        devices: Whether the generators of accelerators are seeded, too.
        load: Whether to load ``numpy.random`` where numpy is loaded; numpy itself loads it at first use.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and (hasattr(numpy, "random") if load else "numpy.random" in sys.modules):
        numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "manual_seed"):
        if devices:
            seed_torch(seed)
        else:
            # torch.manual_seed would seed the accelerators, too.
            torch.default_generator.manual_seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators: of the CPU, and of accelerators if torch is built for one, used or not."""
    import torch

    # torch.manual_seed (2.13) formats a stack for each kind of accelerator that is not there: 0.3 ms in all.
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_of(key: tuple[int, ...]) -> int:
    """Return a seed of 63 bits for a key: keys that differ in one number have unrelated seeds."""
    import hashlib  # here: it takes longer to load than the rest of this module

    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes a signed 64-bit seed


def device_rng_state(device: "torch.device") -> "torch.Tensor":
    """Return the state of an accelerator's default generator, on the CPU."""
    import torch

    module = torch.get_device_module(device)
    # There is one Apple device, and its functions take no argument.
    state: torch.Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_device_rng_state(device: "torch.device", state: "torch.Tensor") -> None:
    """Set the state of a device's generator, as :func:`device_rng_state` returned it."""
    import torch

    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


# -- States in a checkpoint -----------------------------------------------------------------------


def capture_rng_state(devices: "Iterable[torch.device]") -> dict[str, Any]:
    """Return the states of Python's, numpy's (if loaded), torch's and the devices' generators.

    The values are plain: a file of JSON can have them.
    """
    import torch

    from tp_core._devices import available_devices

    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _as_text(torch.get_rng_state()),
        "devices": {},
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    for device in devices:
        if device.type != "cpu" and device in available_devices():  # a planned job's devices may not exist
            state["devices"][str(device)] = _as_text(device_rng_state(device))
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states of :func:`capture_rng_state`; devices that do not exist here are skipped."""
    import torch

    from tp_core._devices import available_devices

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_as_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    kept = state["devices"] if "devices" in state else state["cuda"]  # the key in older files
    for device in available_devices() if kept else ():
        if str(device) in kept:
            set_device_rng_state(device, _as_tensor(kept[str(device)]))


def _as_text(tensor: "torch.Tensor") -> str:
    import base64

    return base64.b64encode(bytes(tensor.tolist())).decode()


def _as_tensor(text: str) -> "torch.Tensor":
    import base64

    import torch

    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
