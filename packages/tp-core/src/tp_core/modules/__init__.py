"""Parts of a user's model: its repeated blocks, its hooks, and classes mixed into a module's own."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._first_party import is_users_hook as is_users_hook
    from tp_core.modules._blocks import repeated_blocks as repeated_blocks
    from tp_core.modules._blocks import without_cache as without_cache
    from tp_core.modules._mixins import Mixin as Mixin
    from tp_core.modules._mixins import mix_in as mix_in
    from tp_core.modules._user_state import has_users_hooks as has_users_hooks
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._first_party": ["is_users_hook"],
            "tp_core.modules._blocks": ["repeated_blocks", "without_cache"],
            "tp_core.modules._mixins": ["Mixin", "mix_in"],
            "tp_core.modules._user_state": ["has_users_hooks"],
        },
    )
