"""Internal interfaces between the tp packages, which may change with any version."""

from typing import TYPE_CHECKING

from tp_core import _lazy

if TYPE_CHECKING:
    from tp_core._builders import call_builder as call_builder
    from tp_core._builders import load_function as load_function
    from tp_core._calls import check_call as check_call
    from tp_core._calls import explain_arguments as explain_arguments
    from tp_core._calls import explain_init as explain_init
    from tp_core._contracts._backend import DevicesBackend as DevicesBackend
    from tp_core._contracts._backend import RanksBackend as RanksBackend
    from tp_core._contracts._backend import check_above_zero as check_above_zero
    from tp_core._contracts._blocks import repeated_blocks as repeated_blocks
    from tp_core._contracts._blocks import without_cache as without_cache
    from tp_core._contracts._job import BUCKET_NBYTES as BUCKET_NBYTES
    from tp_core._contracts._job import averaged_gradients as averaged_gradients
    from tp_core._contracts._job import divisors as divisors
    from tp_core._contracts._job import whole_model_arguments as whole_model_arguments
    from tp_core._contracts._session import PerModule as PerModule
    from tp_core._contracts._trial_batches import copied as copied
    from tp_core._contracts._trial_batches import first_token as first_token
    from tp_core._contracts._trial_batches import mapped as mapped
    from tp_core._contracts._trial_batches import other_batches as other_batches
    from tp_core._contracts._trial_batches import watched_tables as watched_tables
    from tp_core._contracts._trial_runs import ForwardLines as ForwardLines
    from tp_core._contracts._trial_runs import WithoutDropout as WithoutDropout
    from tp_core._contracts._trial_runs import (
        call_without_attention_dropout as call_without_attention_dropout,
    )
    from tp_core._contracts._trial_runs import dropout_rates as dropout_rates
    from tp_core._contracts._trial_runs import functions_named as functions_named
    from tp_core._contracts._trial_runs import idle_lines_in_words as idle_lines_in_words
    from tp_core._contracts._trial_runs import named_tensors as named_tensors
    from tp_core._devices import device_of_rank as device_of_rank
    from tp_core._devices import free_nbytes as free_nbytes
    from tp_core._fully_sharded._memory import resolve_options as resolve_options
    from tp_core._fully_sharded._memory import sharded_memory as sharded_memory
    from tp_core._fully_sharded._memory import sharded_transfers as sharded_transfers
    from tp_core._fully_sharded._memory import unchanged_models as unchanged_models
    from tp_core._fully_sharded._optimizers import WholeSteps as WholeSteps
    from tp_core._fully_sharded._optimizers import check_whole_steps as check_whole_steps
    from tp_core._fully_sharded._optimizers import gathers_matrices as gathers_matrices
    from tp_core._fully_sharded._optimizers import total_shard_norm as total_shard_norm
    from tp_core._fully_sharded._optimizers import whole_matrix_optimizer as whole_matrix_optimizer
    from tp_core._fully_sharded._options import check_offload as check_offload
    from tp_core._fully_sharded._options import parameter_type as parameter_type
    from tp_core._fully_sharded._options import reduction_type as reduction_type
    from tp_core._fully_sharded._session import FullyShardedSession as FullyShardedSession
    from tp_core._fully_sharded._sharding import Sharding as Sharding
    from tp_core._fully_sharded._sharding import describe_presharded as describe_presharded
    from tp_core._fully_sharded._sharding import presharded_mesh as presharded_mesh
    from tp_core._fully_sharded._units import Units as Units
    from tp_core._fully_sharded._units import find_units as find_units
    from tp_core._launch._environment import available_cores as available_cores
    from tp_core._launch._environment import check_process_count as check_process_count
    from tp_core._launch._output import NotebookOutput as NotebookOutput
    from tp_core._launch._output import Progress as Progress
    from tp_core._launch._output import in_notebook as in_notebook
    from tp_core._launch._output import output_console as output_console
    from tp_core._launch._output import shows_progress as shows_progress
    from tp_core._launch._process_group import EXITED_KEY as EXITED_KEY
    from tp_core._launch._process_group import all_gather_single as all_gather_single
    from tp_core._launch._process_group import has_exited as has_exited
    from tp_core._launch._process_group import new_process_group as new_process_group
    from tp_core._launch._process_group import reduce_scatter_single as reduce_scatter_single
    from tp_core._launch._process_group import rendezvous_store as rendezvous_store
    from tp_core._launch._ranks import RankOutcome as RankOutcome
    from tp_core._launch._ranks import RankPool as RankPool
    from tp_core._launch._ranks import dumps_by_value as dumps_by_value
    from tp_core._launch._ranks import rank_outcomes as rank_outcomes
    from tp_core._lazy import lazy_exports as lazy_exports
    from tp_core._transfer import Container as Container
    from tp_core._transfer import PerType as PerType
    from tp_core._transfer import containers as containers
    from tp_core._transfer import move_module as move_module
    from tp_core.data._batches import Envelope as Envelope
    from tp_core.data._batches import split_evenly as split_evenly
    from tp_core.data._parts import cat_rows as cat_rows
    from tp_core.data._parts import is_array as is_array
    from tp_core.data._parts import length_along as length_along
    from tp_core.data._parts import split_rows as split_rows
    from tp_core.data._seeding import capture_rng_state as capture_rng_state
    from tp_core.data._seeding import device_rng_state as device_rng_state
    from tp_core.data._seeding import preserve_rng_state as preserve_rng_state
    from tp_core.data._seeding import restore_rng_state as restore_rng_state
    from tp_core.data._seeding import seed_everything as seed_everything
    from tp_core.data._seeding import seed_of as seed_of
    from tp_core.data._seeding import seed_torch as seed_torch
    from tp_core.data._seeding import seeded as seeded
    from tp_core.data._seeding import set_device_rng_state as set_device_rng_state
    from tp_core.data._step_outputs import SampleRows as SampleRows
    from tp_core.data._step_outputs import join_rows as join_rows
    from tp_core.data._step_outputs import row_count as row_count
    from tp_core.data._step_outputs import step_identity as step_identity
    from tp_core.data._step_outputs import zero_backward as zero_backward
    from tp_core.data._user_loaders import iterates_itself as iterates_itself
    from tp_core.data._workers import start as start
    from tp_core.errors import check_installed as check_installed
    from tp_core.errors import did_you_mean as did_you_mean
    from tp_core.errors import file_meant as file_meant
    from tp_core.errors import raised_where as raised_where
    from tp_core.errors import those_known as those_known
    from tp_core.plugins._select import KNOWN_BACKENDS as KNOWN_BACKENDS
    from tp_core.plugins._select import check_backend_name as check_backend_name
    from tp_core.replicas._compiler import not_compiled_alone as not_compiled_alone
    from tp_core.replicas._random import is_random_op as is_random_op
    from tp_core.replicas._replicas import leave_to_others as leave_to_others
    from tp_core.state._files import slice_of as slice_of
    from tp_core.state._optimizers import hook_steps as hook_steps
    from tp_core.state._optimizers import is_inner_step as is_inner_step
    from tp_core.state._optimizers import is_zero_redundancy as is_zero_redundancy
    from tp_core.tensors._atomic import atomic_part as atomic_part
    from tp_core.tensors._atomic import showing_system_errors as showing_system_errors
    from tp_core.tensors._atomic import sync_folder as sync_folder
    from tp_core.tensors._atomic import write_atomically as write_atomically
    from tp_core.tensors._digests import DIGESTS as DIGESTS
    from tp_core.tensors._digests import INDEX as INDEX
    from tp_core.tensors._digests import read_digests as read_digests
    from tp_core.tensors._ownership import Ownership as Ownership
    from tp_core.tensors._ownership import lock_file_of as lock_file_of
    from tp_core.tensors._ownership import run_in as run_in
    from tp_core.tensors._slices import check_initialized as check_initialized
    from tp_core.tensors._slices import check_not_quantized as check_not_quantized
    from tp_core.tensors._slices import is_dtensor as is_dtensor
    from tp_core.tensors._slices import quantized_parts as quantized_parts
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
                "averaged_gradients",
                "divisors",
                "whole_model_arguments",
            ],
            "tp_core._contracts._session": ["PerModule"],
            "tp_core._contracts._trial_batches": [
                "copied",
                "first_token",
                "mapped",
                "other_batches",
                "watched_tables",
            ],
            "tp_core._contracts._trial_runs": [
                "ForwardLines",
                "WithoutDropout",
                "call_without_attention_dropout",
                "dropout_rates",
                "functions_named",
                "idle_lines_in_words",
                "named_tensors",
            ],
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
            "tp_core._transfer": ["Container", "PerType", "containers", "move_module"],
            "tp_core._fully_sharded._memory": [
                "resolve_options",
                "sharded_memory",
                "sharded_transfers",
                "unchanged_models",
            ],
            "tp_core._fully_sharded._optimizers": [
                "WholeSteps",
                "check_whole_steps",
                "gathers_matrices",
                "total_shard_norm",
                "whole_matrix_optimizer",
            ],
            "tp_core._fully_sharded._options": ["check_offload", "parameter_type", "reduction_type"],
            "tp_core._fully_sharded._session": ["FullyShardedSession"],
            "tp_core._fully_sharded._sharding": ["Sharding", "describe_presharded", "presharded_mesh"],
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
                "EXITED_KEY",
                "all_gather_single",
                "has_exited",
                "new_process_group",
                "reduce_scatter_single",
                "rendezvous_store",
            ],
            "tp_core._launch._ranks": ["RankOutcome", "RankPool", "dumps_by_value", "rank_outcomes"],
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
            "tp_core.state._optimizers": ["hook_steps", "is_inner_step", "is_zero_redundancy"],
        },
    )
