"""Samples in one global order: the same on any number of ranks and workers, resumed anywhere at no cost."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_data._batches import Batcher as Batcher
    from tp_data._batches import BatchSize as BatchSize
    from tp_data._batches import Item as Item
    from tp_data._batches import Piece as Piece
    from tp_data._batches import SampleRow as SampleRow
    from tp_data._files import Access as Access
    from tp_data._loader import Loader as Loader
    from tp_data._loader import Stats as Stats
    from tp_data._order import Shuffle as Shuffle
    from tp_data._packed_rows import RowForm as RowForm
    from tp_data._packed_rows import TokenBatch as TokenBatch
    from tp_data._packed_rows import check_packing as check_packing
    from tp_data._packed_rows import document_block_mask as document_block_mask
    from tp_data._packed_rows import document_mask as document_mask
    from tp_data._sources import Iterables as Iterables
    from tp_data._sources import JsonLines as JsonLines
    from tp_data._sources import Parquet as Parquet
    from tp_data._sources import Source as Source
    from tp_data._sources import TarShards as TarShards
    from tp_data._sources import TextLines as TextLines
    from tp_data._stream import Place as Place
    from tp_data._stream import Stream as Stream
    from tp_data._tokens import Packed as Packed
    from tp_data._tokens import TokenBudget as TokenBudget

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_data._batches": ["BatchSize", "Batcher", "Item", "Piece", "SampleRow"],
            "tp_data._files": ["Access"],
            "tp_data._loader": ["Loader", "Stats"],
            "tp_data._order": ["Shuffle"],
            "tp_data._sources": ["Iterables", "JsonLines", "Parquet", "Source", "TarShards", "TextLines"],
            "tp_data._stream": ["Place", "Stream"],
            "tp_data._packed_rows": [
                "RowForm",
                "TokenBatch",
                "check_packing",
                "document_block_mask",
                "document_mask",
            ],
            "tp_data._tokens": ["Packed", "TokenBudget"],
        },
    )
