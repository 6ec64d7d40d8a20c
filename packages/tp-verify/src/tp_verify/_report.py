"""The report: proven, parted at, and what was not covered."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """The first place where ranks part from one device.

    Attributes:
        what: The kind of number that differs.
        module: The name of the module; empty for the whole model or its loss.
        step: The optimizer step, from 1; 0 for before the first step, and for the evaluation.
        said: How it differs.
        tensor: The name of the parameter, output or input in the module; may be empty.
    """

    what: str
    module: str
    step: int
    said: str
    tensor: str = ""

    @property
    def path(self) -> str:
        """The module and the tensor in it, as one name."""
        return ".".join(part for part in (self.module, self.tensor) if part)

    def __str__(self) -> str:
        """Return one sentence."""
        where = f" of {self.path}" if self.path else ""
        when = f"step {self.step}: " if self.step else ""
        return f"{when}{self.what}{where}: {self.said}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. It is true where nothing parted.

    Attributes:
        name: The name of the strategy.
        ranks: The number of ranks.
        dtype: The type in which they computed.
        finding: The first place where they part; ``None`` if nothing does.
        compared: How many tensors of each kind were compared.
        proven: What was run and found equal, one line each.
        not_covered: What was not seen, one line each: no claim is made about it.
        seconds: The time that it took.
        reproduction: How to run the script that was asked for, or why there is none.
    """

    name: str
    ranks: int
    dtype: str
    finding: Finding | None
    compared: Mapping[str, int]
    proven: Sequence[str]
    not_covered: Sequence[str]
    seconds: float = 0.0
    reproduction: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing parted."""
        return self.finding is None

    def __bool__(self) -> bool:
        """Return :attr:`ok`."""
        return self.ok

    def __str__(self) -> str:
        """Return the report as text."""
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        lines = [f"{self.name} on {ranks}, {self.dtype}: {_outcome(self)}"]
        if self.finding is not None:
            lines.append(f"  {self.finding}")
        lines += [f"  proven for {line}" for line in self.proven]
        lines += [f"  not covered: {line}" for line in self.not_covered]
        if self.reproduction:
            lines.append(f"  reproduce: {self.reproduction}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return the report as one page of HTML, without scripts."""
        return as_page([self])


def _outcome(report: VerifyReport) -> str:
    if not report.ok:
        return "parts from one device"
    if not report.compared:
        return "not tried"
    return "equal to one device"


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem}"
    "h2.ok{color:#1a7f37}h2.parts{color:#cf222e}td{padding:0 1rem 0 0}"
)


def as_page(reports: Sequence[VerifyReport]) -> str:
    """Return reports as one page of HTML."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>tp verify</title><style>{_STYLE}</style>"
        + "".join(map(_section, reports))
        + "</html>\n"
    )


def _section(report: VerifyReport) -> str:
    state = "ok" if report.ok else "parts"
    title = f"{report.name}, {report.ranks} ranks, {report.dtype}: {_outcome(report)}"
    rows = "".join(f"<tr><td>{html.escape(k)}<td>{v}" for k, v in report.compared.items())
    lists = (("Proven for", report.proven), ("Not covered", report.not_covered))
    pieces = [f"<h2 class={state}>{html.escape(title)}</h2>"]
    if report.finding:
        pieces.append(f"<p><strong>{html.escape(str(report.finding))}</strong>")
    for head, lines in lists:
        if lines:
            items = "".join(f"<li>{html.escape(line)}" for line in lines)
            pieces.append(f"<h3>{head}</h3><ul>{items}</ul>")
    if report.reproduction:
        pieces.append(f"<p>Reproduce: <code>{html.escape(report.reproduction)}</code>")
    pieces.append(f"<h3>Compared</h3><table>{rows}</table>")
    return "".join(pieces)
