"""Internal interfaces between the tp packages, which may change with any version."""

# mypy: implicit-reexport
# ruff: noqa: F401 - type checkers read these imports, and not the table

from typing import TYPE_CHECKING

from tp_core import _lazy

if TYPE_CHECKING:
    from tp_core._builders import call_builder, load_function
    from tp_core._calls import check_call, explain_arguments, explain_init
    from tp_core._contracts._backend import DevicesBackend, RanksBackend, check_above_zero
    from tp_core._contracts._blocks import repeated_blocks, without_cache
    from tp_core._contracts._job import BUCKET_NBYTES, divisors, whole_model_arguments
    from tp_core._contracts._session import PerModule
    from tp_core._devices import device_of_rank, free_nbytes
    from tp_core._fully_sharded._memory import resolve_options, sharded_memory
    from tp_core._fully_sharded._optimizers import (
        WholeSteps,
        check_whole_steps,
        gathers_matrices,
        total_shard_norm,
        whole_matrix_optimizer,
    )
    from tp_core._fully_sharded._options import check_offload, parameter_type, reduction_type
    from tp_core._fully_sharded._session import FullyShardedSession
    from tp_core._fully_sharded._sharding import Sharding, describe_presharded, presharded_mesh, reshard
    from tp_core._fully_sharded._units import Units, find_units
    from tp_core._launch._environment import available_cores, check_process_count
    from tp_core._launch._output import NotebookOutput, Progress, in_notebook, output_console, shows_progress
    from tp_core._launch._process_group import (
        all_gather_single,
        new_process_group,
        reduce_scatter_single,
        rendezvous_store,
    )
    from tp_core._launch._ranks import RankOutcome, RankPool, dumps_by_value, pickled_by_value, rank_outcomes
    from tp_core._lazy import lazy_exports
    from tp_core._mixins import Mixin, mix_in
    from tp_core._transfer import device_of, move_module, to_device
    from tp_core._trees import Container, PerType, containers
    from tp_core.compare._trial_runs import call_without_attention_dropout, functions_named
    from tp_core.data._batches import Envelope, split_evenly
    from tp_core.data._parts import cat_rows, is_array, length_along, split_rows
    from tp_core.data._seeding import (
        capture_rng_state,
        device_rng_state,
        preserve_rng_state,
        restore_rng_state,
        seed_everything,
        seed_of,
        seed_torch,
        seeded,
        set_device_rng_state,
    )
    from tp_core.data._step_outputs import SampleRows, join_rows, row_count, step_identity, zero_backward
    from tp_core.data._user_loaders import iterates_itself
    from tp_core.data._workers import start
    from tp_core.errors import check_installed, did_you_mean, file_meant, raised_where, those_known
    from tp_core.plugins._select import KNOWN_BACKENDS, check_backend_name
    from tp_core.replicas._compiler import not_compiled_alone
    from tp_core.replicas._random import is_random_op
    from tp_core.replicas._replicas import leave_to_others
    from tp_core.state._files import slice_of
    from tp_core.state._optimizers import hook_steps, is_zero_redundancy
    from tp_core.tensors._atomic import atomic_part, showing_system_errors, sync_folder, write_atomically
    from tp_core.tensors._digests import DIGESTS, INDEX, read_digests
    from tp_core.tensors._ownership import Ownership, lock_file_of, run_in
    from tp_core.tensors._slices import check_initialized, check_not_quantized, is_dtensor, quantized_parts
else:
    __getattr__, __dir__, __all__ = _lazy.lazy_exports(
        __name__,
        {
            "tp_core._builders": ["call_builder", "load_function"],
            "tp_core._calls": ["check_call", "explain_arguments", "explain_init"],
            "tp_core._contracts._blocks": ["repeated_blocks", "without_cache"],
            "tp_core._contracts._backend": ["DevicesBackend", "RanksBackend", "check_above_zero"],
            "tp_core._contracts._job": [
                "BUCKET_NBYTES",
                "divisors",
                "whole_model_arguments",
            ],
            "tp_core._contracts._session": ["PerModule"],
            "tp_core.compare._trial_runs": ["call_without_attention_dropout", "functions_named"],
            "tp_core.data._batches": ["Envelope", "split_evenly"],
            "tp_core.data._parts": ["cat_rows", "is_array", "length_along", "split_rows"],
            "tp_core.data._seeding": [
                "capture_rng_state",
                "device_rng_state",
                "preserve_rng_state",
                "restore_rng_state",
                "seed_everything",
                "seed_of",
                "seed_torch",
                "seeded",
                "set_device_rng_state",
            ],
            "tp_core.data._step_outputs": [
                "SampleRows",
                "join_rows",
                "row_count",
                "step_identity",
                "zero_backward",
            ],
            "tp_core.data._user_loaders": ["iterates_itself"],
            "tp_core.data._workers": ["start"],
            "tp_core._devices": ["device_of_rank", "free_nbytes"],
            "tp_core._mixins": ["Mixin", "mix_in"],
            "tp_core._transfer": ["device_of", "move_module", "to_device"],
            "tp_core._trees": ["Container", "PerType", "containers"],
            "tp_core._fully_sharded._memory": ["resolve_options", "sharded_memory"],
            "tp_core._fully_sharded._optimizers": [
                "WholeSteps",
                "check_whole_steps",
                "gathers_matrices",
                "total_shard_norm",
                "whole_matrix_optimizer",
            ],
            "tp_core._fully_sharded._options": ["check_offload", "parameter_type", "reduction_type"],
            "tp_core._fully_sharded._session": ["FullyShardedSession"],
            "tp_core._fully_sharded._sharding": [
                "Sharding",
                "describe_presharded",
                "presharded_mesh",
                "reshard",
            ],
            "tp_core._fully_sharded._units": ["Units", "find_units"],
            "tp_core._launch._environment": ["available_cores", "check_process_count"],
            "tp_core._launch._output": [
                "NotebookOutput",
                "Progress",
                "in_notebook",
                "output_console",
                "shows_progress",
            ],
            "tp_core._launch._process_group": [
                "all_gather_single",
                "new_process_group",
                "reduce_scatter_single",
                "rendezvous_store",
            ],
            "tp_core._launch._ranks": [
                "RankOutcome",
                "RankPool",
                "dumps_by_value",
                "pickled_by_value",
                "rank_outcomes",
            ],
            "tp_core._lazy": ["lazy_exports"],
            "tp_core.errors": [
                "check_installed",
                "did_you_mean",
                "file_meant",
                "raised_where",
                "those_known",
            ],
            "tp_core.tensors._atomic": [
                "atomic_part",
                "showing_system_errors",
                "sync_folder",
                "write_atomically",
            ],
            "tp_core.tensors._digests": ["DIGESTS", "INDEX", "read_digests"],
            "tp_core.tensors._ownership": ["Ownership", "lock_file_of", "run_in"],
            "tp_core.tensors._slices": [
                "check_initialized",
                "check_not_quantized",
                "is_dtensor",
                "quantized_parts",
            ],
            "tp_core.plugins._select": ["KNOWN_BACKENDS", "check_backend_name"],
            "tp_core.replicas._replicas": ["leave_to_others"],
            "tp_core.replicas._compiler": ["not_compiled_alone"],
            "tp_core.replicas._random": ["is_random_op"],
            "tp_core.state._files": ["slice_of"],
            "tp_core.state._optimizers": ["hook_steps", "is_zero_redundancy"],
        },
    )
