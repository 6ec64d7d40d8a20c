"""The rates of a machine, given or measured, and the seconds that they make of work and collectives.

An operator takes its start, and the longer of its products and its memory traffic. A collective takes a
latency for each round and its bytes at the rate of the slowest link (the alpha-beta model), along a ring::

    all-gather, reduce-scatter     (ranks - 1) / ranks of the bytes
    all-reduce                     twice that
    across hosts                   the links of all members on a host carry a part each

Source: Hockney, "The communication challenge for MPP", 1994; Thakur et al., "Optimization of collective
communication operations in MPICH", 2005.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.jobs import Transfer

from tp_trainer._memory import Operator

_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBERS = 3  # of a pass, and of a collective among some ranks
_FIRST = "node=8x450GB/s,between=50GB/s"


def parse_rate(text: str, *, unit: str = "") -> float:
    """Return the number of "450GB/s" or "400T" in a second.

    Raises:
        ConfigError: The text is something else.
    """
    end = re.escape(unit)
    found = re.fullmatch(rf"([0-9.]+)\s*([kmgtp]?)(?:{end})?", text.strip(), flags=re.IGNORECASE)
    if found is None or found[1].count(".") > 1 or not found[1].strip(".") or float(found[1]) <= 0:
        msg = f"a rate above 0 is written 450G{unit} or 3.3T{unit}, got {text!r}"
        raise ConfigError(msg)
    return float(found[1]) * _POWERS[found[2].lower()]


@dataclass(frozen=True, slots=True)
class Links:
    """The links of the devices.

    Attributes:
        devices: The devices of a host.
        within: The bytes that a device sends to others of its host in a second.
        between: The bytes that a device sends to other hosts in a second.
    """

    devices: int
    within: float
    between: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``node=8x450GB/s,between=50GB/s``; ``between`` may be left out for one host.

        Raises:
            ConfigError: The text is something else.
        """
        given = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
        found = re.fullmatch(r"(\d+)x(.+)", given.get("node", ""))
        if found is None or int(found[1]) < 1 or given.keys() - {"node", "between"}:
            msg = f"links are written {_FIRST}, for the devices of a host and their rates; got {text!r}"
            raise ConfigError(msg)
        within = parse_rate(found[2], unit="B/s")
        return cls(int(found[1]), within, parse_rate(given.get("between", found[2]), unit="B/s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates of a machine.

    Attributes:
        flops: The floating-point operations of a device in a second, in large matrix products.
        bandwidth: The bytes that a device reads or writes in its memory in a second.
        start_s: The seconds to start an operator.
        passes: The measured seconds of an operator's start, a floating-point operation and a byte in the
            passes of a step: "forward", "backward", "update". They take the place of the three rates above.
        is_ahead: Whether operators are started while earlier ones run, as on an accelerator.
        overlap: The part of computing during which collectives make progress.
        crowding: How many times as fast a rank computes while the others wait: above 1 where ranks share
            cores.
        dtensor_s: The seconds that an operator of the optimizer takes longer on DTensors.
        packing_s: The seconds of the host to pack tensors for a collective, and to unpack them, beside the
            copies.
        latency_s: The seconds of a round of a collective between devices of a host, and between hosts.
        collectives: Measured seconds: by kind, then by the number of ranks, the latency, the seconds for each
            byte, and the part of the cores that exchanging ranks keep busy.
        source: Where the rates are from, in words.
    """

    flops: float = 4e14
    bandwidth: float = 2.5e12
    start_s: float = 6e-6
    passes: Mapping[str, Sequence[float]] = field(default_factory=lambda: MappingProxyType({}))
    is_ahead: bool = True
    overlap: float = 0.9
    crowding: float = 1.0
    dtensor_s: float = 0.0
    packing_s: float = 0.0
    latency_s: tuple[float, float] = (8e-6, 2e-5)
    collectives: Mapping[str, Mapping[str, Sequence[float]]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    source: str = "assumed"

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return what ``tp plan --calibrate`` has written.

        Raises:
            ConfigError: There is no such file, it has something else, or another version of tp wrote it.
        """
        try:
            found: Any = json.loads(Path(path).read_text("utf-8"))
            other = sorted(found.keys() - {f.name for f in fields(cls)})
            given = {name: value for name, value in found.items() if name not in other}
            machine = cls(**{**given, "source": f"measured, {path}"})
            measured = [machine.passes, *machine.collectives.values()]
            is_old = bool(other) or any(len(v) != _NUMBERS for each in measured for v in each.values())
        except (OSError, ValueError, AttributeError, TypeError) as error:
            msg = f"{path} has no measured rates, as tp plan --calibrate writes them: {error}"
            raise ConfigError(msg) from error
        if is_old:
            msg = (
                f"{path} has rates that another version of tp measured; measure them again: "
                f"tp plan --calibrate --devices RANKS --rates {path}"
            )
            raise ConfigError(msg)
        return machine

    def with_speed(self, speed: str) -> Self:
        """Return the rates with another speed of matrix products, as in "400T".

        Raises:
            ConfigError: The text is something else.
        """
        flops = parse_rate(speed)
        passes = {name: (start_s, 1 / flops, byte_s) for name, (start_s, _, byte_s) in self.passes.items()}
        source = f"of {speed} operations/s, others {self.source}"
        return replace(self, flops=flops, passes=passes, source=source)

    def write(self, path: str | Path) -> None:
        """Write the rates as JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {
            "passes": dict(self.passes),
            "collectives": {k: dict(v) for k, v in self.collectives.items()},
        }
        Path(path).write_text(json.dumps(values, indent=1) + "\n", "utf-8")

    def seconds_of(
        self, operators: "Operators", name: str = "forward", *, part: float = 1.0, starts: float = 1.0
    ) -> float:
        """Return the seconds of a pass where a device computes a part, in ``starts`` times the operators."""
        size = part / max(starts, 1e-9)  # of a piece
        start_s, flop_s, byte_s = self.passes.get(name, (self.start_s, 1 / self.flops, 1 / self.bandwidth))
        busy = size * torch.maximum(operators.flops * flop_s, operators.nbytes * byte_s)
        each = torch.clamp(busy, min=start_s) if self.is_ahead else busy + start_s
        return starts * float((each * operators.times).sum())

    def seconds_for(self, transfer: Transfer, links: Links) -> float:
        """Return the seconds of one collective, and of copying its tensors."""
        ranks, nbytes = transfer.ranks, transfer.nbytes
        if ranks < 2:
            return 0.0
        packing = self.packing_s + 2 * nbytes / self.bandwidth if transfer.is_packed else 0.0
        return packing + self._exchanging(transfer, links)

    def _exchanging(self, transfer: Transfer, links: Links) -> float:
        ranks, nbytes = transfer.ranks, transfer.nbytes
        measured = _measured(self, transfer)
        if measured:
            per_byte = measured[1]
            # Ranks that share cores end what comes before one after the other, for which all wait.
            latency = _measured(self, replace(transfer, ranks=max(ranks, transfer.in_step)))[0]
            return latency + per_byte * nbytes
        together = max(1, min(ranks, links.devices // transfer.stride))  # members of one host
        crosses = together < ranks
        rate = min(links.within, links.between * together) if crosses else links.within
        latency = self.latency_s[crosses]
        if transfer.kind == "send":
            return latency + nbytes / (links.between if crosses else links.within)
        once = math.ceil(math.log2(ranks)) * latency + (ranks - 1) / ranks * nbytes / rate
        return 2 * once if transfer.kind == "all-reduce" else once


def busy_part(machine: Machine, transfer: Transfer) -> float:
    """Return the part of a collective's time that no operator hides, where ranks share cores.

    There the copies and sums of an exchange take a core from what computes beside it. Where each rank has a
    device of its own, they do not.
    """
    measured = _measured(machine, transfer)
    return measured[2] if measured and machine.crowding > 1 else 0.0


def _measured(machine: Machine, transfer: Transfer) -> Sequence[float]:
    of_kind = machine.collectives.get(transfer.kind)
    return of_kind[min(of_kind, key=lambda n: abs(int(n) - transfer.ranks))] if of_kind else ()


@dataclass(frozen=True, slots=True)
class Operators:
    """What the operators of a pass compute and move, and how often each runs: tensors of one length."""

    flops: Tensor
    nbytes: Tensor
    times: Tensor

    @classmethod
    def of(cls, log: Sequence[Operator]) -> Self:
        """Return operators of a log."""
        counts = Counter(log)
        table = torch.tensor([(*o, n) for o, n in counts.items()], dtype=torch.float64).reshape(-1, 3)
        return cls(*table.unbind(1))

    def between(self, other: Self, weight: float) -> Self:
        """Return operators that take what lies on the line through the times of these and ``other``."""
        return type(self)(
            torch.cat([self.flops, other.flops]),
            torch.cat([self.nbytes, other.nbytes]),
            torch.cat([self.times * (1 - weight), other.times * weight]),
        )
