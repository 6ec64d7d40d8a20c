"""Random generators that are seeded by a key: a seed, an epoch and a rank, for example.

torch is imported where its generators are seeded: processes without torch compute seeds, too.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from tp_core.device_types import has_generators

if TYPE_CHECKING:
    import torch

__all__ = [
    "capture_rng_state",
    "device_rng_state",
    "preserve_rng_state",
    "preserve_torch_rng_state",
    "restore_rng_state",
    "seed_device",
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
    with preserve_rng_state(()):
        seed_generators(key)
        yield


@contextmanager
def preserve_rng_state(devices: "Iterable[torch.device] | None" = None) -> Iterator[None]:
    """Run a block, and restore the states of Python's, numpy's (if loaded) and torch's generators.

    Args:
        devices: As for :func:`preserve_torch_rng_state`.
    """
    import random  # here, and below: workers that use no random numbers start without it

    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    if numpy is not None:
        numpy_state = numpy.random.get_state()
    else:
        numpy_state = None
    with preserve_torch_rng_state(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def preserve_torch_rng_state(devices: "Iterable[torch.device] | None" = None) -> Iterator[None]:
    """Run a block, and restore the states of torch's generators: of the CPU, and of devices of any type.

    Args:
        devices: The accelerators that the block draws on; ``()`` for a block that draws on the CPU alone. By
            default all of them, if this process uses any: none is started for its generator.
    """
    import torch

    unused = None
    if devices is None:
        devices, unused = _accelerators_in_use()
    cpu_state = torch.get_rng_state()
    states = [(device, device_rng_state(device)) for device in devices if device.type != "cpu"]
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        for device, state in states:
            set_device_rng_state(device, state)
        if unused is not None:
            # torch keeps a seed of the block for the accelerator's start, or the block has started it. It
            # would have begun with the seed that the CPU has.
            unused.manual_seed_all(torch.initial_seed())


def _accelerators_in_use() -> "tuple[Sequence[torch.device], Any]":
    """Return the accelerators if this process uses them; else none, and the module of their type."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return (), None
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", torch.accelerator.is_available)  # mps has none
    if not is_initialized():
        return (), module if hasattr(module, "manual_seed_all") else None
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())], None


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
        load: Whether to load ``random``, and ``numpy.random`` where numpy is loaded; numpy itself loads it
            at first use.
    """
    if load or "random" in sys.modules:
        import random

        random.seed(seed)
    numpy = sys.modules.get("numpy")
    if load:
        has_random = hasattr(numpy, "random")
    else:
        has_random = "numpy.random" in sys.modules
    if numpy is not None and has_random:
        numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "manual_seed"):
        if devices:
            seed_torch(seed)
        else:
            # torch.manual_seed would seed the accelerators, too.
            torch.default_generator.manual_seed(seed)


def seed_torch(seed: int, devices: "Iterable[torch.device] | None" = None) -> None:
    """Seed torch's generators: of the CPU, and of ``devices``.

    Without ``devices`` all accelerators are seeded if torch is built for one, used or not.
    """
    import torch

    # torch.manual_seed (2.13) formats a stack for each kind of accelerator that is not there: 0.3 ms in all.
    if devices is None and torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    for device in devices or ():
        if device.type != "cpu":
            seed_device(device, seed)


def seed_device(device: "torch.device", seed: int) -> None:
    """Seed the default generator of one device."""
    import torch

    # Not by the manual_seed of its type, which for some seeds the current device alone.
    set_device_rng_state(device, torch.Generator(device).manual_seed(seed).get_state())


def seed_of(key: tuple[int, ...]) -> int:
    """Return a seed of 63 bits for a key: keys that differ in one number have unrelated seeds."""
    import hashlib  # here: it takes longer to load than the rest of this module

    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes a signed 64-bit seed


def device_rng_state(device: "torch.device") -> "torch.Tensor":
    """Return the state of a device's default generator, on the CPU."""
    import torch

    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    arguments = (device,) if has_generators(device.type) else ()
    state: torch.Tensor = module.get_rng_state(*arguments)
    return state


def set_device_rng_state(device: "torch.device", state: "torch.Tensor") -> None:
    """Set the state of a device's generator, as :func:`device_rng_state` returned it."""
    import torch

    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    arguments = (device,) if has_generators(device.type) else ()
    module.set_rng_state(state, *arguments)


# -- States in a checkpoint -----------------------------------------------------------------------


def capture_rng_state(devices: "Iterable[torch.device]") -> dict[str, Any]:
    """Return the states of Python's, numpy's (if loaded), torch's and the devices' generators.

    Those of devices go by their place in ``devices``: another host, or another day, has other numbers of
    devices. The values are plain: a file of JSON can have them.
    """
    import random

    import torch

    from tp_core._devices import available_devices

    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _as_text(torch.get_rng_state()),
        "devices": [],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    for device in devices:
        kept = None
        if device.type != "cpu" and device in available_devices():  # a planned job's devices may not exist
            kept = _as_text(device_rng_state(device))
        state["devices"].append([device.type, kept])
    return state


def restore_rng_state(
    state: Mapping[str, Any], devices: "Iterable[torch.device]"
) -> "tuple[torch.device, ...]":
    """Restore the states of :func:`capture_rng_state`, each device's by its place.

    Returns:
        Those of ``devices`` without a state in it, which had fewer devices, or one of another type there.
    """
    import random

    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_as_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    kept_states = state["devices"]
    if isinstance(kept_states, dict):  # of earlier versions: by names such as "cuda:1", in the same order
        kept_states = [(name.partition(":")[0], kept) for name, kept in kept_states.items()]
    restored = {torch.device("cpu")}
    missing: dict[torch.device, None] = {}
    absent: Iterable[tuple[str | None, str | None]] = repeat((None, None))
    for device, (kind, kept) in zip(devices, chain(kept_states, absent), strict=False):
        if device in restored:  # of a device with two places the first counts
            continue
        if kind == device.type and kept is not None:
            set_device_rng_state(device, _as_tensor(kept))
            restored.add(device)
        else:
            missing[device] = None
    return tuple(missing)


def _as_text(tensor: "torch.Tensor") -> str:
    import base64

    return base64.b64encode(bytes(tensor.tolist())).decode()


def _as_tensor(text: str) -> "torch.Tensor":
    import base64

    import torch

    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
