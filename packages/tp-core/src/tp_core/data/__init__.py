"""Batches and the outputs of steps: shares of ranks, batches in parts, combined losses."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._batch import LossReduction as LossReduction
    from tp_core._contracts._batch import Parts as Parts
    from tp_core._contracts._batch import Share as Share
    from tp_core._contracts._batch import StepOutput as StepOutput
    from tp_core.data._batches import CountedBatch as CountedBatch
    from tp_core.data._batches import CountingCollate as CountingCollate
    from tp_core.data._batches import Envelope as Envelope
    from tp_core.data._batches import count_samples as count_samples
    from tp_core.data._batches import split_evenly as split_evenly
    from tp_core.data._loader import PreparedLoader as PreparedLoader
    from tp_core.data._rows import cat_rows as cat_rows
    from tp_core.data._rows import is_array as is_array
    from tp_core.data._rows import length_along as length_along
    from tp_core.data._rows import split_rows as split_rows
    from tp_core.data._scattering import LoadedBatches as LoadedBatches
    from tp_core.data._scattering import Scattering as Scattering
    from tp_core.data._scattering import holds_values as holds_values
    from tp_core.data._scattering import is_sequence as is_sequence
    from tp_core.data._scattering import keys_of as keys_of
    from tp_core.data._step_outputs import SampleRows as SampleRows
    from tp_core.data._step_outputs import combine_outputs as combine_outputs
    from tp_core.data._step_outputs import join_rows as join_rows
    from tp_core.data._step_outputs import near_power_of_two as near_power_of_two
    from tp_core.data._step_outputs import read_weight as read_weight
    from tp_core.data._step_outputs import restore_order as restore_order
    from tp_core.data._step_outputs import row_count as row_count
    from tp_core.data._step_outputs import split_weight as split_weight
    from tp_core.data._step_outputs import step_identity as step_identity
    from tp_core.data._step_outputs import zero_backward as zero_backward
    from tp_core.data._user_loaders import ElasticLoader as ElasticLoader
    from tp_core.data._user_loaders import iterates_itself as iterates_itself
    from tp_core.data._workers import iterate_seeded as iterate_seeded
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._batch": ["LossReduction", "Parts", "Share", "StepOutput"],
            "tp_core.data._batches": [
                "CountedBatch",
                "CountingCollate",
                "Envelope",
                "count_samples",
                "split_evenly",
            ],
            "tp_core.data._loader": ["PreparedLoader"],
            "tp_core.data._rows": ["cat_rows", "is_array", "length_along", "split_rows"],
            "tp_core.data._scattering": [
                "LoadedBatches",
                "Scattering",
                "holds_values",
                "is_sequence",
                "keys_of",
            ],
            "tp_core.data._step_outputs": [
                "SampleRows",
                "combine_outputs",
                "join_rows",
                "near_power_of_two",
                "read_weight",
                "restore_order",
                "row_count",
                "split_weight",
                "step_identity",
                "zero_backward",
            ],
            "tp_core.data._user_loaders": ["ElasticLoader", "iterates_itself"],
            "tp_core.data._workers": ["iterate_seeded"],
        },
    )
