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


def make():
    torch.manual_seed(0)
    model = build()
{cut}    for own in map(vars, model.modules()):  # without dropout
        own.update({{k: 0.0 for k, v in own.items() if type(v) is float and ("drop" in k or k == "p")}})
    return model.to({dtype})


def parallelize(model):
{parallel}
    return model


def train(model, batch, ranks):
    seen = {{}}
    for name, module in model.named_modules():
        if name.removeprefix("module.") == {module!r}:
            module.register_forward_hook(lambda module, args, output: seen.update(output=output))
    found = step(model, batch)
    loss, weight = (found["loss"], found.get("weight", 1)) if isinstance(found, dict) else (found, 1)
    sums = torch.stack([loss.detach().double() * weight, torch.as_tensor(weight).double()])
    if ranks > 1:
        dist.all_reduce(sums)
    (loss * float(weight * ranks / sums[1])).backward()
    named = {{"the loss": sums[0] / sums[1], "the output of {module}": seen.get("output")}}
    named |= {{"the gradient of " + n.removeprefix("module."): p.grad for n, p in model.named_parameters()}}
    whole = {{n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in named.items()}}
    return {{n: t.detach().double() for n, t in whole.items() if isinstance(t, torch.Tensor)}}


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
exact = train(make(), BATCH, 1)
mine = train(parallelize(make()), {share}, {count})
for name, whole in exact.items():
    part = mine.get(name, torch.tensor(float("nan")))
    whole = whole.tensor_split({count})[rank] if "output" in name and {count} > 1 else whole
    apart = (part - whole).norm() / whole.norm() if part.shape == whole.shape else float("nan")
    print(f"rank {{rank}}: {{name}} differs by {{apart:.2g}} of its norm")
'''


def script(case: Case, step: Step, way: Way, finding: Finding, dtype: torch.dtype | None) -> str:
    """Return a script that prints how ranks differ from one device, for what the finding names."""
    is_rows = way.data == "rows"
    cut = [f"    del model.get_submodule({name!r})[1:]\n" for name in case.cut]
    if case.cut and hasattr(getattr(case.build(), "config", None), "num_hidden_layers"):
        cut.append("    model.config.num_hidden_layers = 1\n")
    share = "BATCH"
    if is_rows:
        share = "{k: t.tensor_split(ranks)[rank] for k, t in BATCH.items()}"
        share = share if isinstance(case.batch, dict) else "BATCH.tensor_split(ranks)[rank]"
    return _SCRIPT.format(
        found=finding,
        ranks=case.ranks,
        functions="\n".join(function_lines(case.build, step)),
        batch=_written(case.batch),
        cut="".join(cut),
        dtype=dtype or "torch.get_default_dtype()",
        parallel="\n".join(f"    {line}" for line in way.lines()),
        module=finding.module,
        share=share,
        count="ranks" if is_rows else "1",
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
