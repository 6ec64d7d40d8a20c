"""The translation of a transformers model's own plan."""

from fnmatch import fnmatchcase

from torch import nn
from tp_core.errors import ConfigError, ModelError

from tp_shard._plans._adapters import inside_peft
from tp_shard._plans._styles import Column, Experts, Local, Replicated, Row, Style
from tp_shard._search._prove import Proof
from tp_shard.nn._convert import is_linear

_SPLIT = ("colwise", "rowwise", "moe_tp_experts")
_VOCABULARY = ("embedding_rowwise", "embedding_colwise")


def translate(model: nn.Module) -> dict[str, str]:
    """Return the entry of a transformers model's own plan for each of its modules, by name.

    Raises:
        ConfigError: The model has no plan of its own, or one that names no module.
    """
    start, model = inside_peft(model)
    found = _named(model)
    return {f"{start}.{path}" if start else path: word for path, word in found.items()}


def _named(model: nn.Module) -> dict[str, str]:
    rules = dict(getattr(model, "_tp_plan", None) or {})
    config = getattr(model, "config", None)
    if not rules and config is not None:
        start = getattr(model, "base_model_prefix", "")
        start = f"{start}." if start and hasattr(model, start) else ""
        rules = {
            start + name: word for name, word in (getattr(config, "base_model_tp_plan", None) or {}).items()
        }
    found = {
        path: word
        for path, _ in model.named_modules()
        for pattern, word in rules.items()
        if fnmatchcase(path, pattern) and path.count(".") == pattern.count(".")
    }
    inside = [w for p, w in found.items() if _is_block(w) and not _is_head(model, p)]
    if not inside:
        msg = (
            f"{type(model).__name__} brings no plan of its blocks along (base_model_tp_plan in "
            "its configuration); "
            "take ts.plans.auto(model), which needs none"
        )
        raise ConfigError(msg)
    return {path: word for path, word in found.items() if _is_block(word) and not _is_head(model, path)}


def restrict(proof: Proof, named: dict[str, str]) -> None:
    """Reduce a proof to the modules that the plan of transformers names, and raise if one is not proven.

    Raises:
        ModelError: A module is not proven; the message names it, the reason and the styles to write.
    """
    first = {name: word for name, word in named.items() if not _in_repeat(proof, name)}
    plan = proof.plan
    for name, word in first.items():
        if name in plan or name not in proof.flow.called:
            continue  # modules that a small batch does not reach, such as a branch for images, stay whole
        reason = next((proof.notes[p] for p in _around(name) if p in proof.notes), "nothing feeds it alone")
        msg = (
            f"{name} is {word!r} in the plan of transformers, and could not be proven right: "
            f"{reason}. Write its "
            "styles by hand (Column(), Row(), Local()), verify them with ts.verify(), or take "
            "ts.plans.auto(), "
            "which leaves it whole"
        )
        raise ModelError(msg)
    blocks = {name.rpartition(".")[0] for name in first} | set(first)
    for name, style in list(plan.items()):
        if not _belongs(name, style, first, blocks):
            del plan[name]


def _belongs(name: str, style: Style, named: dict[str, str], blocks: set[str]) -> bool:
    if isinstance(style, Column | Row | Experts):
        return name in named or any(name.startswith(f"{b}.") or name == b for b in blocks if b)
    return isinstance(style, Local | Replicated) and any(
        name == b or name.startswith(f"{b}.") for b in blocks if b
    )


def _in_repeat(proof: Proof, name: str) -> bool:
    return any(name == repeat or name.startswith(f"{repeat}.") for repeat in proof.repeats)


def _around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _is_block(word: str) -> bool:
    return any(kind in word for kind in _SPLIT) and word not in _VOCABULARY


def _is_head(model: nn.Module, path: str) -> bool:
    return is_linear(model.get_submodule(path)) and "." not in path
