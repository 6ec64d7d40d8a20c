"""The smallest case that still parts, written as a script of torch alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.compare import named_tensors
from tp_core.errors import ConfigError, ModelError
from tp_core.modules import repeated_blocks
from tp_core.random import preserve_rng_state

from tp_verify._report import Finding
from tp_verify._strategy import Step, Strategy, function_lines, mapped, row_count
from tp_verify._training_task import cast


def is_shown(finding: Finding, strategy: Strategy) -> bool:
    """Return whether a script can show a finding: a number of the first forward and backward pass."""
    shown = ["the loss", "the gradient"]
    if type(strategy).backward is Strategy.backward:
        shown += ["the output", "the gradient of the input"]
    return finding.step == 1 and finding.what in shown


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


def smallest(case: Case, strategy: Strategy, parts: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still parts: with the fewest ranks, rows, places and layers."""
    for shrink in (_fewer_ranks, _fewer_rows, _fewer_places, _fewer_layers):
        for smaller in shrink(case, strategy):
            if not parts(smaller):
                break
            case = smaller
    return case


def _fewer_ranks(case: Case, _strategy: Strategy) -> Iterator[Case]:
    if case.ranks > 2:
        yield replace(case, ranks=2)


def _fewer_rows(case: Case, strategy: Strategy) -> Iterator[Case]:
    rows = row_count(case.batch)
    least = 1
    if strategy.data == "rows":  # one for each rank
        least = case.ranks
    while rows > least:
        rows = max(least, rows // 2)
        yield replace(case, batch=_narrowed(case.batch, 0, rows))


def _fewer_places(case: Case, _strategy: Strategy) -> Iterator[Case]:
    places = next((t.size(1) for _, t in named_tensors(case.batch) if t.dim() > 1), 1)
    while places > 3:
        places //= 2
        yield replace(case, batch=_narrowed(case.batch, 1, places))


def _fewer_layers(case: Case, _strategy: Strategy) -> Iterator[Case]:
    with preserve_rng_state():
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

    def narrowed(tensor: Tensor) -> Tensor:
        if tensor.dim() > dim and tensor.size(dim) == whole:
            return tensor.narrow(dim, 0, size)
        return tensor

    return mapped(batch, narrowed)


# -- The script -----------------------------------------------------------------------------------

_SCRIPT = '''"""{finding}

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


def script(case: Case, step: Step, strategy: Strategy, finding: Finding, dtype: torch.dtype | None) -> str:
    """Return a script that prints how ranks differ from one device, for what the finding names."""
    with preserve_rng_state():
        model = case.build()
        plain = case()
        if dtype is not None:
            plain = plain.to(dtype)
        output = step(plain, cast(case.batch, dtype))
    functions = function_lines(case.build, step)
    if (case.build.__name__, step.__name__) != ("build", "step"):
        functions.append(f"build, step = {case.build.__name__}, {step.__name__}")
    body = [f"del model.get_submodule({name!r})[1:]" for name in case.cut]
    if case.cut and hasattr(getattr(model, "config", None), "num_hidden_layers"):
        body.append("model.config.num_hidden_layers = 1")
    if any("Dropout" in type(m).__name__ or "drop" in "".join(vars(m)) for m in model.modules()):
        body += _DROPOUT
    parallel = strategy.lines()
    passes = _passes(case, strategy, finding, output)
    has_rows = strategy.data == "rows"
    if has_rows:
        share = "BATCH.tensor_split(ranks)[rank]"
        if isinstance(case.batch, dict):
            share = "{k: t.tensor_split(ranks)[rank] for k, t in BATCH.items()}"
        parallel = [*parallel, f"batch, count = {share}, ranks"]
    if type(strategy).backward is not Strategy.backward:  # the strategy's lines have run it
        passes = ["else:", *(f"    {line}" for line in passes)]
    name = finding.path or next(n for n, p in model.named_parameters() if p.requires_grad)
    body += ["if is_parallel:", *(f"    {line}" for line in parallel), *passes]
    if finding.what == "the loss":
        body.append("both.append(loss.detach())")
    else:
        tensor = "seen[0]"
        if finding.what == "the gradient":
            body.append("parameters = {n.removeprefix('module.'): p for n, p in model.named_parameters()}")
            tensor = f"parameters[{name!r}].grad"
        whole = 'getattr(tensor, "full_tensor", tensor.clone)().detach()'
        body += [f"tensor = {tensor}", f"both.append(torch.zeros(0) if tensor is None else {whole})"]
    # Of an output or an input ranks have their rows; a gradient of the mean over fewer rows is larger.
    factor = {"the output": "", "the gradient of the input": " * ranks"}.get(finding.what)
    place = ""
    if has_rows and factor is not None:
        place = f"\nwhole = whole.tensor_split(ranks)[rank]{factor}"
    what = finding.what
    if what != "the loss":
        what = f"{what} of {name}"
    return _SCRIPT.format(
        finding=finding,
        ranks=case.ranks,
        functions="\n".join(functions),
        batch=_written(case.batch, dtype),
        count=", count" if has_rows else "",
        dtype="" if dtype is None else f".to({dtype})",
        one=", 1" if has_rows else "",
        body="\n".join(f"    {line}" for line in body),
        place=place,
        what=what,
    )


def _passes(case: Case, strategy: Strategy, finding: Finding, output: Any) -> list[str]:
    """Return the lines of a forward pass, and of a backward pass where the finding is of one."""
    lines = []
    if finding.what.startswith("the gradient of the input") or finding.what == "the output":
        lines = ["modules = {n.removeprefix('module.'): m for n, m in model.named_modules()}", "seen = []"]
        hook = "full_backward_hook(lambda m, inputs, _: seen.append(inputs[0]))"
        if finding.what == "the output":
            keys = [key if key.isdigit() else repr(key) for key in finding.tensor.split(".") if key]
            place = "".join(f"[{key}]" for key in keys)
            hook = f"forward_hook(lambda m, args, output: seen.append(output{place}))"
        lines.append(f"modules[{finding.module!r}].register_{hook}")
    if finding.what == "the output":
        return [*lines, "step(model, batch)"]
    loss = ".loss"
    if isinstance(output, Mapping):
        loss = '["loss"]'
    elif isinstance(output, Tensor):
        loss = ""
    if strategy.data != "rows":
        lines.append(f"loss = step(model, batch){loss}")
    else:
        lines += ["made = step(model, batch)", f"loss = made{loss}"]
        if isinstance(output, Mapping) and "weight" in output:
            weight = 'made["weight"]'
        elif isinstance(case.batch, Tensor):
            weight = "len(batch)"
        else:
            weight = "len(next(iter(batch.values())))"
        lines += [
            f"sums = torch.tensor([float(loss) * float({weight}), float({weight})], dtype=torch.float64)",
            "if is_parallel:",
            "    dist.all_reduce(sums)",
            f"loss = loss * (float({weight}) * count / float(sums[1]))",
        ]
        if finding.what == "the loss":
            return [*lines[:-1], "loss = sums[0] / sums[1]"]
    if finding.what != "the loss":
        lines.append("loss.backward()")
    return lines


def _written(batch: Any, dtype: torch.dtype | None) -> str:
    """Return a batch as source code, with its floating-point tensors in ``dtype``."""
    if isinstance(batch, Tensor):
        tensor_dtype = batch.dtype
        if dtype is not None and batch.is_floating_point():
            tensor_dtype = dtype
        option = ""
        if tensor_dtype not in (torch.int64, torch.float32, torch.bool):  # those that torch infers
            option = f", dtype={tensor_dtype}"
        return f"torch.tensor({batch.tolist()}{option})"
    entries = [f"{key!r}: {_written(inner, dtype)}" for key, inner in batch.items()]
    return "{" + ", ".join(entries) + "}"


def check_reproducible(build: Any, step: Any, batches: Any, strategy: Strategy) -> None:
    """Check that a script can say what it needs.

    Raises:
        ConfigError: The builder or the step is not at the top of a file. Or a batch is neither a tensor nor a
            dict of them, or the strategy has no lines for a script.
    """
    function_lines(build, step)
    for batch in batches:
        inside = batch.values() if isinstance(batch, dict) else [batch]
        if not all(isinstance(one, Tensor) for one in inside):
            msg = f"a script has tensors or a dict of them as batch, not {batch!r:.50}: leave out reproduce"
            raise ConfigError(msg)
    strategy.lines()
    for method in ("parallelize", "prepare", "backward"):
        if not issubclass(_definer(strategy, "lines"), _definer(strategy, method)):
            kind = type(strategy).__name__
            msg = f"{kind} has a {method}() that its lines() lack: override lines(), or leave out reproduce"
            raise ConfigError(msg)


def _definer(strategy: Strategy, method: str) -> type:
    return next(kind for kind in type(strategy).__mro__ if method in vars(kind))
