"""Batches and the outputs of steps: shares of ranks, batches in parts, combined losses, random states."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.data._batches import CountedBatch as CountedBatch
    from tp_core.data._batches import Share as Share
    from tp_core.data._batches import count_samples as count_samples
    from tp_core.data._loader import PreparedLoader as PreparedLoader
    from tp_core.data._parts import Parts as Parts
    from tp_core.data._seeding import capture_rng_state as capture_rng_state
    from tp_core.data._seeding import restore_rng_state as restore_rng_state
    from tp_core.data._seeding import seed_everything as seed_everything
    from tp_core.data._step_outputs import LossReduction as LossReduction
    from tp_core.data._step_outputs import SampleRows as SampleRows
    from tp_core.data._step_outputs import StepOutput as StepOutput
    from tp_core.data._step_outputs import combine_outputs as combine_outputs
    from tp_core.data._step_outputs import near_power_of_two as near_power_of_two
    from tp_core.data._step_outputs import read_weight as read_weight
    from tp_core.data._step_outputs import restore_order as restore_order
    from tp_core.data._step_outputs import split_weight as split_weight
    from tp_core.data._user_loaders import ElasticLoader as ElasticLoader
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.data._batches": ["CountedBatch", "Share", "count_samples"],
            "tp_core.data._loader": ["PreparedLoader"],
            "tp_core.data._parts": ["Parts"],
            "tp_core.data._seeding": ["capture_rng_state", "restore_rng_state", "seed_everything"],
            "tp_core.data._step_outputs": [
                "LossReduction",
                "SampleRows",
                "StepOutput",
                "combine_outputs",
                "near_power_of_two",
                "read_weight",
                "restore_order",
                "split_weight",
            ],
            "tp_core.data._user_loaders": ["ElasticLoader"],
        },
    )
