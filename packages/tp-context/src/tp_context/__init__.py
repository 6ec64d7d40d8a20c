"""Context parallelism: each sequence split over ranks, exact for any attention mask."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_context._attention import attention as attention
    from tp_context._options import ContextOptions as ContextOptions
    from tp_context._split_state import gather as gather
    from tp_context._split_state import positions as positions

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_context._attention": ["attention"],
            "tp_context._options": ["ContextOptions"],
            "tp_context._split_state": ["gather", "positions"],
        },
    )
