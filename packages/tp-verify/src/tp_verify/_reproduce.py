"""The smallest case that still parts, written as a script of torch alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.compare import named_tensors
from tp_core.errors import ConfigError, ModelError
from tp_core.modules import repeated_blocks

from tp_verify._report import Finding
from tp_verify._run import cast
from tp_verify._way import Step, Way, function_lines, mapped, row_count


def is_shown(finding: Finding, way: Way) -> bool:
    """Return whether a script can show a finding: a number of the first forward and backward pass."""
    inside = () if type(way).backward is not Way.backward else ("the output", "the gradient of the input")
    return finding.step == 1 and finding.what in ("the loss", "the gradient", *inside)


@dataclass(frozen=True)
class Case:
    """What is tried: a builder, one batch, the number of ranks, and lists of blocks that keep their first."""

    build: Callable[[], nn.Module]
    batch: Any
    ranks: int
    cut: tuple[str, ...] = ()

    def __call__(self) -> nn.Module:
        """Build the model with the layers that are left."""
        model = self.build()
        for name in self.cut:
            blocks: Any = model.get_submodule(name)
            del blocks[1:]
        config: Any = getattr(model, "config", None)
        if self.cut and hasattr(config, "num_hidden_layers"):
            config.num_hidden_layers = 1  # models of transformers are loaded by it
        return model


def smallest(case: Case, way: Way, parts: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still parts: with the fewest ranks, rows, places and layers."""
    for shrink in (_fewer_ranks, _fewer_rows, _fewer_places, _fewer_layers):
        for smaller in shrink(case, way):
            if not parts(smaller):
                break
            case = smaller
    return case


def _fewer_ranks(case: Case, _way: Way) -> Iterator[Case]:
    if case.ranks > 2:
        yield replace(case, ranks=2)


def _fewer_rows(case: Case, way: Way) -> Iterator[Case]:
    rows, least = row_count(case.batch), case.ranks if way.data == "rows" else 1
    while rows > least:
        rows = max(least, rows // 2)
        yield replace(case, batch=_narrowed(case.batch, 0, rows))


def _fewer_places(case: Case, _way: Way) -> Iterator[Case]:
    places = next((t.size(1) for _, t in named_tensors(case.batch) if t.dim() > 1), 1)
    while places > 3:
        places //= 2
        yield replace(case, batch=_narrowed(case.batch, 1, places))


def _fewer_layers(case: Case, _way: Way) -> Iterator[Case]:
    with torch.random.fork_rng(devices=[]):
        model = case.build()
    try:
        names = [name.rpartition(".")[0] for name in repeated_blocks(model)]
    except ModelError:
        return
    lists = [name for name in dict.fromkeys(names) if isinstance(model.get_submodule(name), nn.ModuleList)]
    if lists:
        yield replace(case, cut=tuple(lists))


def _narrowed(batch: Any, dim: int, size: int) -> Any:
    whole = next((t.size(dim) for _, t in named_tensors(batch) if t.dim() > dim), 0)
    return mapped(batch, lambda t: t.narrow(dim, 0, size) if t.dim() > dim and t.size(dim) == whole else t)


# -- The script -----------------------------------------------------------------------------------

_SCRIPT = '''"""{found}

    torchrun --nproc-per-node {ranks} FILE
"""

import runpy
import torch
import torch.distributed as dist

{functions}
BATCH = {batch}
dist.init_process_group("gloo")
rank, ranks, both = dist.get_rank(), dist.get_world_size(), []
for is_parallel in (False, True):
    torch.manual_seed(0)
    model, batch{count} = build(){dtype}, BATCH{one}
{body}
whole, part = both{place}
if part.shape == whole.shape:
    print(f"rank {{rank}}: {what} differs by {{(part - whole).norm() / whole.norm():.2g}} of its norm")
'''

# Where the model has rates of dropout.
_DROPOUT = [
    "for own in map(vars, model.modules()):",
    '    own.update({k: 0.0 for k, v in own.items() if type(v) is float and ("drop" in k or k == "p")})',
]


def script(case: Case, step: Step, way: Way, finding: Finding, dtype: torch.dtype | None) -> str:
    """Return a script that prints how ranks differ from one device, for what the finding names."""
    with torch.random.fork_rng(devices=[]):
        model = case.build()
        plain = case()
        output = step(plain if dtype is None else plain.to(dtype), cast(case.batch, dtype))
    functions = function_lines(case.build, step)
    if (case.build.__name__, step.__name__) != ("build", "step"):
        functions.append(f"build, step = {case.build.__name__}, {step.__name__}")
    body = [f"del model.get_submodule({name!r})[1:]" for name in case.cut]
    if case.cut and hasattr(getattr(model, "config", None), "num_hidden_layers"):
        body.append("model.config.num_hidden_layers = 1")
    if any("Dropout" in type(m).__name__ or "drop" in "".join(vars(m)) for m in model.modules()):
        body += _DROPOUT
    parallel, passes = way.lines(), _passes(case, way, finding, output)
    if way.data == "rows":
        share = "{k: t.tensor_split(ranks)[rank] for k, t in BATCH.items()}"
        share = share if isinstance(case.batch, dict) else "BATCH.tensor_split(ranks)[rank]"
        parallel = [*parallel, f"batch, count = {share}, ranks"]
    if type(way).backward is not Way.backward:  # the way's lines have run it
        passes = ["else:", *(f"    {line}" for line in passes)]
    name = finding.path or next(n for n, p in model.named_parameters() if p.requires_grad)
    body += ["if is_parallel:", *(f"    {line}" for line in parallel), *passes]
    if finding.what == "the loss":
        body.append("both.append(loss.detach())")
    else:
        found = "seen[0]"
        if finding.what == "the gradient":
            body.append("parameters = {n.removeprefix('module.'): p for n, p in model.named_parameters()}")
            found = f"parameters[{name!r}].grad"
        whole = 'getattr(found, "full_tensor", found.clone)().detach()'
        body += [f"found = {found}", f"both.append(torch.zeros(0) if found is None else {whole})"]
    cut = {"the output": "", "the gradient of the input": " * ranks"}.get(finding.what)
    return _SCRIPT.format(
        found=finding,
        ranks=case.ranks,
        functions="\n".join(functions),
        batch=_written(case.batch, dtype),
        count=", count" if way.data == "rows" else "",
        dtype="" if dtype is None else f".to({dtype})",
        one=", 1" if way.data == "rows" else "",
        body="\n".join(f"    {line}" for line in body),
        place=f"\nwhole = whole.tensor_split(ranks)[rank]{cut}"
        if way.data == "rows" and cut is not None
        else "",
        what="the loss" if finding.what == "the loss" else f"{finding.what} of {name}",
    )


def _passes(case: Case, way: Way, finding: Finding, output: Any) -> list[str]:
    """Return the lines of a forward pass, and of a backward pass where the finding is of one."""
    lines = []
    if finding.what.startswith("the gradient of the input") or finding.what == "the output":
        lines = ["modules = {n.removeprefix('module.'): m for n, m in model.named_modules()}", "seen = []"]
        hook = "backward_hook(lambda m, inputs, _: seen.append(inputs[0]))"
        if finding.what == "the output":
            place = "".join(f"[{k if k.isdigit() else repr(k)}]" for k in finding.tensor.split(".") if k)
            hook = f"forward_hook(lambda m, args, output: seen.append(output{place}))"
        kind = "full_" if "backward" in hook else ""
        lines.append(f"modules[{finding.module!r}].register_{kind}{hook}")
    if finding.what == "the output":
        return [*lines, "step(model, batch)"]
    loss = '["loss"]' if isinstance(output, Mapping) else "" if isinstance(output, Tensor) else ".loss"
    if way.data != "rows":
        lines.append(f"loss = step(model, batch){loss}")
    else:
        lines += ["made = step(model, batch)", f"loss = made{loss}"]
        rows = "batch" if isinstance(case.batch, Tensor) else "next(iter(batch.values()))"
        weight = 'made["weight"]' if isinstance(output, Mapping) and "weight" in output else f"len({rows})"
        lines += [
            f"sums = torch.tensor([float(loss) * float({weight}), float({weight})], dtype=torch.float64)",
            "if is_parallel:",
            "    dist.all_reduce(sums)",
            f"loss = loss * (float({weight}) * count / float(sums[1]))",
        ]
        if finding.what == "the loss":
            return [*lines[:-1], "loss = sums[0] / sums[1]"]
    return lines if finding.what == "the loss" else [*lines, "loss.backward()"]


def _written(batch: Any, dtype: torch.dtype | None) -> str:
    if isinstance(batch, Tensor):
        kept = dtype if dtype is not None and batch.is_floating_point() else batch.dtype
        kind = "" if kept in (torch.int64, torch.float32, torch.bool) else f", dtype={kept}"
        return f"torch.tensor({batch.tolist()}{kind})"
    return "{" + ", ".join(f"{key!r}: {_written(inner, dtype)}" for key, inner in batch.items()) + "}"


def check_reproducible(build: Any, step: Any, batches: Any, way: Way) -> None:
    """Check that a script can say what it needs.

    Raises:
        ConfigError: The builder or the step is not at the top of a file. Or a batch is neither a tensor nor a
            dict of them, or the way has no lines for a script.
    """
    function_lines(build, step)
    for batch in batches:
        inside = batch.values() if isinstance(batch, dict) else [batch]
        if not all(isinstance(one, Tensor) for one in inside):
            msg = f"a script has tensors or a dict of them as batch, not {batch!r:.50}: leave out reproduce"
            raise ConfigError(msg)
    way.lines()
    for method in ("parallelize", "prepare", "backward"):
        if not issubclass(_definer(way, "lines"), _definer(way, method)):
            kind = type(way).__name__
            msg = f"{kind} has a {method}() that its lines() lack: override lines(), or leave out reproduce"
            raise ConfigError(msg)


def _definer(way: Way, method: str) -> type:
    return next(kind for kind in type(way).__mro__ if method in vars(kind))
