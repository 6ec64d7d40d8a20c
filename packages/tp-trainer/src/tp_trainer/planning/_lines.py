"""The lines that start a planned layout: the launch, and the trainer of the script."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass

from tp_core.jobs import Layout, Precision, Recomputation

_AGAIN: Mapping[Recomputation, str] = {
    "all but matmuls": 'checkpoint_activations(model, keep="matmuls")',
    "every 2nd block": "checkpoint_activations(model, every=2)",
    "every block": "checkpoint_activations(model)",
}


def start_lines(
    backend: str,
    layout: Layout,
    *,
    accumulate: int,
    recomputation: Recomputation,
    precision: Precision,
    samples: int,
    hosts: int,
) -> str:
    """Return the command, and the lines of the script, each on a line of its own."""
    each = layout.ranks // hosts
    many = f" --nnodes {hosts} --rdzv-endpoint HOST:29500" if hosts > 1 else ""
    command = "python train.py" if layout.ranks == 1 else f"tp launch{many} -n {each} train.py"
    loader = f"DataLoader(..., batch_size={samples})"
    lines = [f"{command}, with:", *([layout.setup] if layout.setup else [])]
    if recomputation in _AGAIN:
        lines.append(_AGAIN[recomputation])
    return "\n".join(
        [*lines, trainer_line(backend, layout, accumulate=accumulate, precision=precision), loader]
    )


def trainer_line(backend: str, layout: Layout, *, accumulate: int, precision: Precision) -> str:
    """Return the trainer of a layout, as it is written in a script."""
    arguments = [f'backend="{backend}"']
    if precision != "fp32":
        arguments.append(f'precision="{precision}"')
    if accumulate > 1:
        arguments.append(f"accumulate={accumulate}")
    given = {name: dict(options) for name, options in layout.options.items() if options}
    if given:
        arguments.append(f"options={_written(given)}")
    return f"Trainer({', '.join(arguments)})"


def _written(value: object) -> str:
    """Return a value as it is written in a script; an object of options by the fields that differ."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}": {_written(v)}' for key, v in value.items()) + "}"
    if isinstance(value, str):
        return f'"{value}"'
    if is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{f.name}={_written(getattr(value, f.name))}"
            for f in fields(value)
            if f.default is MISSING or getattr(value, f.name) != f.default
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    return repr(value)
