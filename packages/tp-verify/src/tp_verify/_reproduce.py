"""The smallest case that still parts, written as a script of torch alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, ModelError
from tp_core.internal import repeated_blocks

from tp_verify._report import Finding
from tp_verify._way import Step, Way, function_lines, mapped, row_count, tensors_in

SHOWN = ("the output", "the loss", "the gradient", "the gradient of the input")
"""The kinds of findings that a script can show: numbers of the first forward and backward pass."""


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
    places = next((t.size(1) for _, t in tensors_in(case.batch) if t.dim() > 1), 1)
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
    whole = next((t.size(dim) for _, t in tensors_in(batch) if t.dim() > dim), 0)
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
    model, batch, count = build(), BATCH, 1
{cut}{dropout}    model = model.to({dtype})
    if is_parallel:
{parallel}
    seen = {{}}
    for name, module in model.named_modules():
        if name.removeprefix("module.") == {module!r}:
            module.register_forward_hook(lambda module, args, output: seen.update({{{output!r}: output}}))
    made = step(model, batch)
    loss, weight = (made["loss"], made.get("weight", 1)) if isinstance(made, dict) else (made, 1)
    sums = torch.stack([loss.detach().double() * weight, torch.as_tensor(weight).double()])
{summed}    (loss * float(weight * count / sums[1])).backward()
    seen |= {{"the gradient of " + n.removeprefix("module."): p.grad for n, p in model.named_parameters()}}
    seen = {{"the loss": sums[0] / sums[1]}} | {{n: t for n, t in seen.items() if torch.is_tensor(t)}}
    both.append({{n: getattr(t, "full_tensor", t.clone)().double() for n, t in seen.items()}})
for name, whole in both[0].items():
    part = both[1].get(name, torch.tensor(float("nan")))
{place}    apart = (part - whole).norm() / whole.norm() if part.shape == whole.shape else float("nan")
    print(f"rank {{rank}}: {{name}} differs by {{apart:.2g}} of its norm")
'''

# Where the model has rates of dropout.
_DROPOUT = """    for own in map(vars, model.modules()):
        own.update({k: 0.0 for k, v in own.items() if type(v) is float and ("drop" in k or k == "p")})
"""
# Where ranks have rows of their own.
_SUMMED = "    if is_parallel:\n        dist.all_reduce(sums)\n"
_PLACE = '    whole = whole.tensor_split(ranks)[rank] if name.startswith("the output") else whole\n'


def script(case: Case, step: Step, way: Way, finding: Finding, dtype: torch.dtype | None) -> str:
    """Return a script that prints how ranks differ from one device, for what the finding names."""
    with torch.random.fork_rng(devices=[]):
        model = case.build()
    is_rows = way.data == "rows"
    drops = any("Dropout" in type(m).__name__ or "drop" in "".join(vars(m)) for m in model.modules())
    cut = [f"    del model.get_submodule({name!r})[1:]\n" for name in case.cut]
    if case.cut and hasattr(getattr(model, "config", None), "num_hidden_layers"):
        cut.append("    model.config.num_hidden_layers = 1\n")
    parallel = way.lines()
    if is_rows:
        share = "{k: t.tensor_split(ranks)[rank] for k, t in BATCH.items()}"
        share = share if isinstance(case.batch, dict) else "BATCH.tensor_split(ranks)[rank]"
        parallel = [*parallel, f"batch, count = {share}, ranks"]
    return _SCRIPT.format(
        found=finding,
        ranks=case.ranks,
        functions="\n".join(function_lines(case.build, step)),
        batch=_written(case.batch),
        cut="".join(cut),
        dropout=_DROPOUT if drops else "",
        dtype=dtype or "torch.get_default_dtype()",
        parallel="\n".join(f"        {line}" for line in parallel),
        module=finding.module,
        output=f"the output of {finding.module}",
        summed=_SUMMED if is_rows else "",
        place=_PLACE if is_rows else "",
    )


def _written(batch: Any) -> str:
    if isinstance(batch, Tensor):
        kind = "" if batch.dtype in (torch.int64, torch.float32, torch.bool) else f", dtype={batch.dtype}"
        return f"torch.tensor({batch.tolist()}{kind})"
    return "{" + ", ".join(f"{key!r}: {_written(inner)}" for key, inner in batch.items()) + "}"


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
    if type(way).backward is not Way.backward:
        msg = f"a script has no backward pass of its own, as {type(way).__name__} has: leave out reproduce"
        raise ConfigError(msg)
    way.lines()
