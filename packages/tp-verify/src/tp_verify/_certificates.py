"""What a resumed training has of the undisturbed one: weights, optimizer state, random numbers, samples.

``tp verify --resume`` asks for it. Runs of any program come as lines that each of its ranks has written, see
``_recorder_path``; the step that a run resumed is found in them, as no program says it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tp_core.errors import ConfigError

from tp_verify._report import Finding

# A tensor in short: its digest, a sketch, its type and shape.
_Short = Sequence[Any]
_Shorts = Mapping[str, _Short]

_WORDS = {
    "weights": "the weights",
    "states": "the optimizer's state",
    "settings": "the optimizer's settings",
    "random": "the random numbers",
    "rows": "the samples",
}


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank of a run has recorded.

    Attributes:
        begin: Weights and states before the first step, as they were loaded.
        steps: For each optimizer step, what was there after it.
        moments: The moments at which it wrote to the folder of its checkpoints.
    """

    begin: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    moments: Sequence[Mapping[str, Any]]

    def after(self, step: int) -> Mapping[str, Any]:
        """Return what was there after a step; 0 is before the first one."""
        if step:
            return self.steps[step - 1]
        return self.begin

    def saves(self) -> list[int]:
        """Return the steps after which it wrote to the folder."""
        return sorted({moment["step"] for moment in self.moments if moment["step"]})


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of the command.

    Attributes:
        ranks: What its ranks have recorded, in their order.
        failed: Why it did not end as it should; empty where it did.
        seconds: The time that it took.
    """

    ranks: Sequence[RankRecord]
    failed: str = ""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """The optimizer steps that all ranks have made."""
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def rows(self, step: int) -> list[str]:
        """Return the rows that all ranks together got in a step, in no order."""
        return sorted(row for rank in self.ranks for row in rank.after(step)["rows"])


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a run that was killed and resumed trained as the undisturbed one. It is true where it did.

    Attributes:
        name: How it was killed, and resumed.
        findings: What it has otherwise, the causes first.
        equal: What is equal to the bit, or up to rounding, in words.
        not_covered: What was not seen: no claim is made about it.
        seconds: The time of its runs.
    """

    name: str
    findings: Sequence[Finding]
    equal: str
    not_covered: Sequence[str]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def __str__(self) -> str:
        """Return the certificate as text."""
        if self.ok:
            outcome = "the same training"
        else:
            outcome = "not the same training"
        lines = [f"{self.name}: {outcome}", *(f"  {finding}" for finding in self.findings)]
        if self.equal:
            lines.append(f"  equal {self.equal}")
        lines += [f"  not covered: {line}" for line in self.not_covered]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as values for JSON."""
        return {"ok": self.ok, **asdict(self)}


def check_repeats(whole: RecordedRun, again: RecordedRun) -> Finding | None:
    """Return the first difference between two runs without a kill, as far as the shorter one came."""
    for step in range(1, min(whole.steps, again.steps) + 1):
        for number, (first, second) in enumerate(zip(whole.ranks, again.ranks, strict=False)):
            for kind in ("rows", "weights", "states", "settings"):
                said = _apart(first.after(step), second.after(step), kind)
                if said:
                    difference = f"rank {number} has other ones in a second run, before any kill: {said}"
                    return Finding(_WORDS[kind], "", step, difference)
    return None


def certify(
    name: str, whole: RecordedRun, killed: RecordedRun, resumed: RecordedRun, *, is_inside: bool = False
) -> Certificate:
    """Compare a run that was killed and resumed with the undisturbed one.

    Args:
        name: How it was killed.
        whole: The undisturbed run.
        killed: The killed run.
        resumed: The run that resumed it, on as many ranks or on others.
        is_inside: Whether the kill was inside a save, which may count as made, or not.
    """
    seconds = killed.seconds + resumed.seconds
    finding = check_repeats(whole, killed)
    if finding is not None:
        return Certificate(
            name, [finding], "", ["resuming: the program trains otherwise in each run"], seconds
        )
    if resumed.failed:
        finding = Finding("the resumed run", "", 0, resumed.failed)
        return Certificate(name, [finding], "", [], seconds)
    if not resumed.steps:
        finding = Finding("the resumed run", "", 0, "it ended well, and made no step")
        return Certificate(name, [finding], "", [], seconds)
    saves = killed.ranks[0].saves()
    if is_inside:
        saves = saves[:-1]
    newest = saves[-1] if saves else 0
    start = _resumed_after(whole, killed, resumed, newest)
    if start == 0 and newest:
        difference = f"it began anew with step 1, though it had saved after step {newest}"
        finding = Finding("the resumed run", "", 0, difference)
        return Certificate(name, [finding], "", [], seconds)
    if start:
        name += f", resumed after step {start}"
    else:
        name += ", begun anew, as nothing whole was saved"
    return _compared(name, whole, killed, resumed, start, seconds)


def _compared(
    name: str, whole: RecordedRun, killed: RecordedRun, resumed: RecordedRun, start: int, seconds: float
) -> Certificate:
    is_same_size = len(resumed.ranks) == len(whole.ranks)
    compared = [(whole.ranks[0], resumed.ranks[0])]
    if is_same_size:
        compared = list(zip(whole.ranks, resumed.ranks, strict=True))
    elif len(resumed.ranks) == 1:
        name += " on 1 rank"
    else:
        name += f" on {len(resumed.ranks)} ranks"
    unseeded = _unseeded(whole, killed)
    last = min(whole.steps, start + resumed.steps)
    kinds = ["weights", "states", "settings", "random", "rows"]
    not_covered = []
    if not any(step["rows"] for rank in whole.ranks for step in rank.steps):
        kinds.remove("rows")
        not_covered.append("samples: no model that is trained was called with tensors")
    if not is_same_size:
        kinds.remove("random")
        not_covered.append("random numbers: other ranks draw others")
    for generator in sorted(unseeded):
        not_covered.append(f"the generator of {generator}: each run has another state, as nobody seeds it")

    causes = _loaded_apart(whole, compared, start, not_covered, is_same_size=is_same_size)
    differing = {finding.what for finding in causes}
    later = {}
    for kind in kinds:
        found = _first_step_apart(whole, resumed, compared, kind, start, last, unseeded)
        if found is not None:
            later[kind] = found
    causes += [later[kind] for kind in ("rows", "settings", "random") if kind in later]
    total = start + resumed.steps
    if total != whole.steps:
        said = f"the run ends after {total}, and after {whole.steps} without a kill"
        causes.append(Finding("the number of steps", "", 0, said))
    # Weights and states follow from the causes; alone, they are one.
    for kind in ("weights", "states"):
        if kind in later and (kind == "weights" or "weights" not in later):
            causes.append(later[kind])
    equal = [
        _WORDS[kind] for kind in kinds if kind not in later and f"{_WORDS[kind]}, as loaded" not in differing
    ]
    words = ""
    if equal:
        if is_same_size:
            how = "bit by bit"
        else:
            how = "bit by bit as loaded, then up to rounding"
        words = f"{how}, up to step {last}: {', '.join(equal)}"
    return Certificate(name, causes, words, not_covered, seconds)


# -- The step that was resumed ----------------------------------------------------------------------------


def _resumed_after(whole: RecordedRun, killed: RecordedRun, resumed: RecordedRun, newest: int) -> int:
    """Return the step after which a run went on, as most of what it has says.

    Weights, optimizer state, the first samples and the number of steps up to the end say one each, and so
    does the newest save: one that is wrong does not decide.
    """
    begin, votes = resumed.ranks[0].begin, Counter({newest: 1})
    by_weights = set()
    reached = max(len(rank.steps) for rank in killed.ranks)
    for step in range(min(reached, whole.steps) + 1):
        before = whole.ranks[0].after(step)
        if _is_same(before["weights"], begin["weights"]):
            by_weights.add(step)
            votes[step] += 1
        if _is_same(before["states"], begin["states"]):
            votes[step] += 1
        if step < whole.steps and resumed.rows(1) and whole.rows(step + 1) == resumed.rows(1):
            votes[step] += 1
    by_number = whole.steps - resumed.steps
    if 0 <= by_number <= reached:
        votes[by_number] += 1
    return max(votes, key=lambda step: (votes[step], step == newest, step in by_weights, step))


def _is_same(before: _Shorts, begin: _Shorts) -> bool:
    common = before.keys() & begin.keys()
    return bool(common) and all(before[name][0] == begin[name][0] for name in common)


# -- Differences ------------------------------------------------------------------------------------------


def _apart(
    first: Mapping[str, Any], second: Mapping[str, Any], kind: str, *, skip: Sequence[str] = ()
) -> str:
    """Return how one kind of numbers differs to the bit; empty where it does not."""
    if kind == "rows":
        if first["rows"] == second["rows"]:
            return ""
        return "they are others"
    if kind == "random":
        kinds = [name for name in first["random"] if name not in skip]
        drawn = [name for name in kinds if first["random"][name] != second["random"].get(name)]
        if drawn:
            return f"the generator of {' and of '.join(drawn)} is in another state"
        return ""
    return _tensors_apart(first[kind], second[kind], kind)


def _tensors_apart(first: _Shorts, second: _Shorts, kind: str, *, rtol: float | None = None) -> str:
    """Return how tensors differ: to the bit, or with ``rtol`` by more than a share of the norm of all.

    With ``rtol``, tensors of other shapes are left out: ranks have other parts of them.
    """
    common = [name for name in first if name in second]
    if rtol is not None:
        common = [name for name in common if first[name][2] == second[name][2]]
    else:
        missing = [name for name in first if name not in second]
        if missing:
            return f"{missing[0]} is missing"
    differing = [name for name in common if first[name][0] != second[name][0]]
    if not differing:
        return ""
    if kind == "settings":
        name = differing[0]
        return f"{name} is {second[name][0]}, and not {first[name][0]}"
    distances = {name: _distance(first[name][1], second[name][1]) for name in differing}
    norm = math.hypot(*(_norm(first[name][1]) for name in common))
    share = math.hypot(*distances.values()) / max(norm, 1e-300)
    if rtol is not None and share <= rtol:
        return ""
    most = max(differing, key=lambda name: distances[name] / max(_norm(first[name][1]), 1e-300))
    return f"they differ by {share:.2g} of their norm, most in {most}"


def _norm(sketch: Sequence[float]) -> float:
    return math.hypot(*sketch)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) != len(second):
        return math.inf
    distance = math.hypot(*(a - b for a, b in zip(first, second, strict=True)))
    if math.isnan(distance):
        return math.inf
    return distance


def _rounding(shorts: _Shorts) -> float:
    """Return the share of a norm that rounding explains, over the steps of a training."""
    import torch
    from tp_core.compare import Bound

    dtypes = {getattr(torch, kind.partition(" ")[0].removeprefix("torch.")) for _, _, kind in shorts.values()}
    return Bound.of(dtypes, depth="training").rtol


def _loaded_apart(
    whole: RecordedRun,
    compared: Sequence[tuple[RankRecord, RankRecord]],
    start: int,
    not_covered: list[str],
    *,
    is_same_size: bool,
) -> list[Finding]:
    """Return how weights and states differ before the first step of the resumed run."""
    findings = []
    for kind in ("weights", "states"):
        for first, second in compared:
            before, begin = first.after(start)[kind], second.begin[kind]
            names = [name for name in before if name in first.begin["weights"] or kind == "states"]
            expected = {name: before[name] for name in names}  # without buffers
            in_parts = [n for n in expected if n in begin and begin[n][2] != expected[n][2]]
            if in_parts and not is_same_size:
                not_covered.append(f"{_WORDS[kind]} of which ranks have parts, as {in_parts[0]}")
                expected = {name: short for name, short in expected.items() if name not in in_parts}
            said = _tensors_apart(expected, begin, kind)
            if said and kind == "states" and not begin:
                said = "there is none: it was not loaded"
            others = [step for step in range(whole.steps + 1) if _is_same(first.after(step)[kind], begin)]
            if said and others:
                said = f"it is that of step {others[-1]}"
                if kind == "weights":
                    said = f"they are those of step {others[-1]}"
            if said:
                findings.append(Finding(f"{_WORDS[kind]}, as loaded", "", 0, said))
                break
    return findings


def _first_step_apart(
    whole: RecordedRun,
    resumed: RecordedRun,
    compared: Sequence[tuple[RankRecord, RankRecord]],
    kind: str,
    start: int,
    last: int,
    unseeded: Sequence[str],
) -> Finding | None:
    """Return the first step after which one kind of numbers differs, and how it does in the end."""
    is_same_size = len(resumed.ranks) == len(whole.ranks)

    def apart(step: int) -> str:
        if kind == "rows" and whole.rows(step) != resumed.rows(step - start):
            return _other_rows(whole, resumed.rows(step - start))
        if kind == "rows" and not is_same_size:
            return ""  # ranks share them otherwise
        for first, second in compared:
            before, after = first.after(step), second.after(step - start)
            if is_same_size or kind == "settings":
                said = _apart(before, after, kind, skip=unseeded)
            else:
                said = _tensors_apart(before[kind], after[kind], kind, rtol=_rounding(before["weights"]))
            if said:
                return said
        return ""

    for step in range(start + 1, last + 1):
        said = apart(step)
        if not said:
            continue
        end = apart(last)
        if kind in ("weights", "states") and last > step and " differ by " in end:
            share = end.partition(" differ ")[2].partition(",")[0]
            said = f"{said}; {share} after step {last}"
        return Finding(_WORDS[kind], "", step, said)
    return None


def _other_rows(whole: RecordedRun, rows: Sequence[str]) -> str:
    for step in range(1, whole.steps + 1):
        if whole.rows(step) == rows:
            return f"they are those of step {step}"
    seen = {row for step in range(1, whole.steps + 1) for row in whole.rows(step)}
    if len(rows) and not seen.intersection(rows):
        return "they are others, which the undisturbed run never had"
    return "they are others"


def _unseeded(whole: RecordedRun, killed: RecordedRun) -> list[str]:
    """Return the generators whose states differ between two runs that train the same."""
    found = set()
    for first, second in zip(whole.ranks, killed.ranks, strict=False):
        for one, other in zip(first.steps, second.steps, strict=False):
            found |= {name for name, state in one["random"].items() if other["random"].get(name) != state}
    return sorted(found)


# -- Lines ------------------------------------------------------------------------------------------------


def read_ranks(lines: Iterable[Sequence[Mapping[str, Any]]]) -> list[RankRecord]:
    """Return what each rank has recorded, from the lines of each process.

    Raises:
        ConfigError: A process could not be recorded, or two of them train as one rank.
    """
    by_rank: dict[int, RankRecord] = {}
    for process in lines:
        broken = [line for line in process if line["event"] == "broken"]
        if broken:
            msg = f"rank {broken[0]['rank']} could not be recorded: {broken[0]['said']}"
            raise ConfigError(msg)
        steps = [line for line in process if line["event"] == "step"]
        moments = [line for line in process if line["event"] == "moment"]
        if not steps:  # a launcher, or a helper
            continue
        rank = steps[0]["rank"]
        if rank in by_rank:
            msg = f"two processes of the command train as rank {rank}; certify one training at a time"
            raise ConfigError(msg)
        begin = next(line for line in process if line["event"] == "begin")
        by_rank[rank] = RankRecord(begin, steps, moments)
    return [by_rank[rank] for rank in sorted(by_rank)]
