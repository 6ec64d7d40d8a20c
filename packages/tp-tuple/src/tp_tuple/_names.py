"""States of a wrapper under the names of the plain module in it."""

from typing import Any

from torch import nn

__all__ = ["use_module_names"]


def use_module_names(wrapper: nn.Module) -> None:
    """Leave ``module.`` out of the names in ``wrapper``'s states, and of those that loading reports."""
    wrapper.register_state_dict_post_hook(_leave_out_module)
    wrapper.register_load_state_dict_pre_hook(_note_prefix)
    wrapper.register_load_state_dict_post_hook(_report_without_module)


def _leave_out_module(_wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    inner = f"{prefix}module."
    values = {key: state.pop(key) for key in [key for key in state if key.startswith(inner)]}
    state.update({prefix + key.removeprefix(inner): value for key, value in values.items()})
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # Under both names: those without are for the plain module, loading looks for the others.
        own = {key: value for key, value in versions.items() if f"{key}.".startswith(inner)}
        versions.update({f"{prefix}{key[len(inner) :]}".rstrip("."): v for key, v in own.items()})


def _note_prefix(wrapper: nn.Module, _state: dict[str, Any], prefix: str, *_: Any) -> None:
    wrapper.__dict__["_loading_prefix"] = prefix


def _report_without_module(wrapper: nn.Module, incompatible: Any) -> None:
    prefix = wrapper.__dict__.pop("_loading_prefix")
    missing: list[str] = incompatible.missing_keys
    inner = f"{prefix}module."
    missing[:] = [prefix + key.removeprefix(inner) if key.startswith(inner) else key for key in missing]
