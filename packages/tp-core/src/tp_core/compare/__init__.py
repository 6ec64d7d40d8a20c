"""Are these the same numbers? One answer, and one table of bounds, for all that proves parallel training.

Record what modules return on one device and in parallel, relate each rank's part to the whole, and name the
first difference beyond rounding.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.compare._bounds import SLACK as SLACK
    from tp_core.compare._bounds import Bound as Bound
    from tp_core.compare._bounds import ComputedTypes as ComputedTypes
    from tp_core.compare._bounds import assert_same as assert_same
    from tp_core.compare._bounds import coarsest as coarsest
    from tp_core.compare._bounds import difference_in_words as difference_in_words
    from tp_core.compare._bounds import distance as distance
    from tp_core.compare._bounds import first_difference as first_difference
    from tp_core.compare._bounds import norm_of as norm_of
    from tp_core.compare._bounds import nudged as nudged
    from tp_core.compare._bounds import relative_error as relative_error
    from tp_core.compare._layouts import BatchSelection as BatchSelection
    from tp_core.compare._layouts import Match as Match
    from tp_core.compare._layouts import Selections as Selections
    from tp_core.compare._layouts import cut_dim as cut_dim
    from tp_core.compare._layouts import difference_on_ranks as difference_on_ranks
    from tp_core.compare._layouts import joined_parts as joined_parts
    from tp_core.compare._layouts import merged as merged
    from tp_core.compare._layouts import relate as relate
    from tp_core.compare._layouts import selected as selected
    from tp_core.compare._recording import LocalTensor as LocalTensor
    from tp_core.compare._recording import Recording as Recording
    from tp_core.compare._recording import TensorPlace as TensorPlace
    from tp_core.compare._recording import copy_of as copy_of
    from tp_core.compare._recording import undisturbed as undisturbed
    from tp_core.compare._trial_batches import copied as copied
    from tp_core.compare._trial_batches import first_token as first_token
    from tp_core.compare._trial_batches import mapped as mapped
    from tp_core.compare._trial_batches import other_batches as other_batches
    from tp_core.compare._trial_batches import watched_tables as watched_tables
    from tp_core.compare._trial_runs import ForwardLines as ForwardLines
    from tp_core.compare._trial_runs import WithoutDropout as WithoutDropout
    from tp_core.compare._trial_runs import call_without_attention_dropout as call_without_attention_dropout
    from tp_core.compare._trial_runs import dropout_rates as dropout_rates
    from tp_core.compare._trial_runs import functions_named as functions_named
    from tp_core.compare._trial_runs import idle_lines_in_words as idle_lines_in_words
    from tp_core.compare._trial_runs import in_backward_pass as in_backward_pass
    from tp_core.compare._trial_runs import named_tensors as named_tensors
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.compare._bounds": [
                "SLACK",
                "Bound",
                "ComputedTypes",
                "assert_same",
                "coarsest",
                "difference_in_words",
                "distance",
                "first_difference",
                "norm_of",
                "nudged",
                "relative_error",
            ],
            "tp_core.compare._layouts": [
                "BatchSelection",
                "Match",
                "Selections",
                "cut_dim",
                "difference_on_ranks",
                "joined_parts",
                "merged",
                "relate",
                "selected",
            ],
            "tp_core.compare._recording": [
                "LocalTensor",
                "Recording",
                "TensorPlace",
                "copy_of",
                "undisturbed",
            ],
            "tp_core.compare._trial_batches": [
                "copied",
                "first_token",
                "mapped",
                "other_batches",
                "watched_tables",
            ],
            "tp_core.compare._trial_runs": [
                "ForwardLines",
                "WithoutDropout",
                "call_without_attention_dropout",
                "dropout_rates",
                "functions_named",
                "idle_lines_in_words",
                "in_backward_pass",
                "named_tensors",
            ],
        },
    )
