"""Samples in one global order: the same on any number of ranks and workers, resumed anywhere at no cost."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_data._batches import Batcher as Batcher
    from tp_data._batches import BatchSize as BatchSize
    from tp_data._batches import Item as Item
    from tp_data._batches import Piece as Piece
    from tp_data._batches import Row as Row

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_data._batches": ["BatchSize", "Batcher", "Item", "Piece", "Row"],
        },
    )
