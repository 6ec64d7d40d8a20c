"""The public surface of tp_core: what is exported."""

import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import tp_core
import tp_core.compare
import tp_core.data
import tp_core.discovery
import tp_core.errors
import tp_core.internal
import tp_core.jobs
import tp_core.launching
import tp_core.plugins
import tp_core.ranks
import tp_core.secrets
import tp_core.sessions
import tp_core.state
import tp_core.tensors

from tests.surface.names import PACKAGES

PUBLIC = {
    tp_core: """
        DeviceLoad DeviceSpec LaunchEnvironment as_device available_devices device_loads errors least_busy
        plugins recursive_pin recursive_to resolve_devices tree_leaves tree_map
    """,
    tp_core.plugins: """
        Backend Callback CollateAdapter Command Engine Job Logger LoggerFactory NamedCallback NoOptions Pool
        RunInfo RunStatus RunView Session Verdict hookimpl lazy_exports registry
    """,
    tp_core.compare: """
        SLACK BatchSelection Bound ComputedTypes ForwardLines LocalTensor Match Recording Selections
        TensorPlace WithoutDropout assert_same coarsest copied copy_of cut_dim difference_in_words
        difference_on_ranks distance dropout_rates first_difference first_token idle_lines_in_words
        joined_parts mapped merged named_tensors norm_of nudged other_batches relate relative_error
        selected undisturbed watched_tables
    """,
    tp_core.data: """
        CountedBatch ElasticLoader LossReduction Parts PreparedLoader SampleRows Share StepOutput
        capture_rng_state combine_outputs count_samples near_power_of_two read_weight restore_order
        restore_rng_state seed_everything split_weight
    """,
    tp_core.tensors: """
        SHARDED_ATTRIBUTE TensorSlice build_deferred initial_value is_deferred is_sharded materialize
    """,
    tp_core.sessions: """
        FullyShardOptions ProcessGroupSession ReduceOp SessionWrapper join_process_group new_process_group
    """,
    tp_core.jobs: """
        Axis CompileOptions Footprint Layout MemoryNeed ModelTraits Precision Recomputation
        replicated_memory
    """,
    tp_core.launching: """
        EXITED_KEY EXIT_REPORT ExitReport discard_closed_terminal has_exited read_exit_report
        write_exit_report
    """,
    tp_core.secrets: """
        MASK is_secret mask_arguments mask_text
    """,
    tp_core.discovery: """
        CONTRACT_VERSION ENTRY_POINT_GROUP FIRST_PARTY KNOWN_BACKENDS OWN_COMMANDS
        BrokenPlugin Candidate Contribution HookSpecs NameConflict
        PluginInfo PluginRegistry Selection select
    """,
    tp_core.ranks: "RankOutcome RankPool free_port rank_outcomes run_ranks",
    tp_core.state: """
        DIGEST_SIZE TENSORS_FILE TENSORS_FOLDER Cut FileRecord Place SafetensorsFiles StoredTensors
        TensorInfo atomic_part collect_state collect_values digest_of fill_from_whole from_json hook_steps
        is_safetensors load_state load_whole_state named_parameters open_tensors optimizer_names plain_name
        plain_state read_tensors record_of restore_state restore_values safetensors_dtype split_over_files
        tensor_infos to_json whole write_safetensors write_tensors write_whole
    """,
    tp_core.internal: """
        BUCKET_NBYTES DIGESTS INDEX KNOWN_BACKENDS Container DevicesBackend Envelope
        FullyShardedSession Mixin NotebookOutput Ownership PerModule PerType Progress RankOutcome
        RankPool RanksBackend SampleRows Sharding Units WholeSteps all_gather_single
        atomic_part available_cores call_builder call_without_attention_dropout
        capture_rng_state cat_rows check_above_zero check_backend_name check_call check_initialized
        check_installed check_not_quantized check_offload check_process_count check_whole_steps
        containers describe_presharded device_of device_of_rank device_rng_state did_you_mean divisors
        dumps_by_value explain_arguments explain_init file_meant find_units
        free_nbytes functions_named gathers_matrices hook_steps in_notebook
        is_array is_dtensor is_random_op is_zero_redundancy iterates_itself join_rows
        lazy_exports leave_to_others length_along load_function lock_file_of mix_in move_module
        new_process_group not_compiled_alone output_console parameter_type
        pickled_by_value preserve_rng_state presharded_mesh quantized_parts raised_where rank_outcomes
        read_digests reduce_scatter_single reduction_type rendezvous_store repeated_blocks reshard
        resolve_options restore_rng_state row_count run_in seed_everything seed_of seed_torch seeded
        set_device_rng_state
        sharded_memory showing_system_errors shows_progress slice_of split_evenly
        split_rows start step_identity sync_folder those_known to_device total_shard_norm
        whole_matrix_optimizer whole_model_arguments without_cache write_atomically
        zero_backward
    """,
}


def test_the_public_names_are_these():
    assert {m.__name__: m.__all__ for m in PUBLIC} == {
        m.__name__: names.split() for m, names in PUBLIC.items()
    }


def test_what_is_exported_exists_and_is_sorted_constants_first():
    for module in [*PUBLIC, tp_core.errors]:
        key = lambda n: (not n.replace("_", "").isupper(), n[0].islower(), n)  # noqa: E731 - short
        assert module.__all__ == sorted(module.__all__, key=key), module
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], module


def test_every_error_is_a_tp_error_and_a_builtin_that_users_catch():
    for name in tp_core.errors.__all__:
        error = getattr(tp_core.errors, name)
        assert issubclass(error, tp_core.errors.TpError)
        assert name in tp_core.errors.__doc__
        if error is not tp_core.errors.TpError:
            builtin = [base for base in error.__mro__ if base.__module__ == "builtins"]
            assert set(builtin) > {Exception, BaseException, object}, "and none that users would catch"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_errors_of_a_package_are_called_so_and_are_in_a_module_of_errors(package):
    module = pytest.importorskip(package)
    modules = [tp_core.errors, getattr(module, "errors", tp_core.errors)]
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, type) and issubclass(found, Exception):
            assert name.endswith("Error")
            assert found in [getattr(errors, name, None) for errors in modules]


def test_a_package_says_its_version():
    installed = {package: importlib.import_module(package) for package in PACKAGES if find_spec(package)}
    assert {package: module.__version__ for package, module in installed.items()} == {
        package: version(package.replace("_", "-")) for package in installed
    }


def test_a_table_is_what_a_package_exports(tmp_path, monkeypatch):
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tp_core.internal import lazy_exports\n"
        "__getattr__, __dir__, __all__ = lazy_exports(__name__, {\n"
        "    'lazy_package': ['compat'],\n"
        "    'lazy_package._names': ['B_C', 'Late', '_hidden', 'map'],\n"
        "    'lazy_package.compat': ['old'],\n"
        "})\n"
    )
    (package / "_names.py").write_text("B_C, Late, _hidden, map = 1, 2, 3, 4\n")
    (package / "compat.py").write_text("old = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lazy_package")
    assert module.__all__ == ["B_C", "Late", "compat"]
    assert not vars(module).keys() & {"Late", "_names", "compat"}
    assert [module.B_C, module.Late, module._hidden, module.map, module.old] == [1, 2, 3, 4, 5]
    assert {"B_C", "Late", "_hidden", "compat", "map", "old"} <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        module.other  # noqa: B018 - it raises
    for name in [name for name in sys.modules if name.startswith("lazy_package")]:
        del sys.modules[name]
