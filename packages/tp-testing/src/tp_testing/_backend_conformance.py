"""The conformance tests of backends, for their authors to subclass."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported
from torch.utils.data import DataLoader
from tp_core.compare import Bound, assert_same, relative_error
from tp_core.data import PreparedLoader
from tp_core.jobs import MemoryNeed
from tp_core.plugins import Verdict
from tp_core.ranks import RankPool, run_ranks

from tp_testing import _backend_checks as checks
from tp_testing._kit import (
    ConformanceKit,
    batch_loss,
    data,
    loss_of,
    make_job,
    sorted_rows,
)

# Here and not on the classes: these are pickled for the ranks, and a pool cannot be.
_pools: dict[type, RankPool] = {}
_exchanged: dict[type, list[Any]] = {}

SAME = Bound.of([torch.float64])
"""The bound of losses: kits compute in float64."""


class BackendConformance(ConformanceKit):
    """The tests of every backend. A subclass, in a test module, names the backend.

    The proof is equality. Losses, gradients and weights equal those of one device with the whole batch, in
    double precision. The model has tied, frozen and tiny parameters, and buffers. Collectives return what
    the contract says, states are whole, ``assess()`` changes nothing, and one process can open several
    sessions in turn. The tests of a class share their ranks.

    Attributes:
        exchange_processes: The number of ranks for tests of collectives, besides ``processes``. More than
            two: with two, half a sum is a mean, and one other rank is all others. Use fewer where devices
            are missing. A backend for one process does not use it.

    Example:
        >>> class TestMine(BackendConformance):
        ...     backend = MyBackend
    """

    exchange_processes: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def _end_ranks_with_the_class(self, request: pytest.FixtureRequest) -> None:
        owner = request.node.getparent(pytest.Class)
        if type(self) not in _pools and owner is not None:
            owner.addfinalizer(self.end_ranks)

    @classmethod
    def end_ranks(cls) -> None:
        """End the ranks that the tests of this class have shared."""
        pool = _pools.pop(cls, None)
        if pool is not None:
            pool.close()

    def everywhere(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``body(self, *args)`` on every rank and return the results.

        Raises:
            RankFailedError: A rank raised, died or took too long; the next call gets new ranks.
        """
        if self.processes == 1:
            return [body(self, *args)]
        pool = _pools.setdefault(type(self), RankPool(self.processes))
        return pool.run(body, self, *args)

    def exchanged(self) -> list[dict[str, Any]]:
        """Return the results of `checks.exchange` on each rank; the ranks are started once."""
        kit = type(self)
        if kit not in _exchanged:
            if self.processes > 1:
                ranks = self.exchange_processes
            else:
                ranks = 1
            if ranks > 1:
                _exchanged[kit] = run_ranks(checks.exchange, ranks, self)
            else:
                _exchanged[kit] = [checks.exchange(self)]
        return _exchanged[kit]

    # -- Equality with one device, in double precision --

    def test_loss_and_gradients_are_those_of_one_device(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(checks.train_gradients, 8, 8, "mean"):
            assert_same(gradients, expected)

    def test_gradients_in_single_precision_are_those_of_one_device(self) -> None:
        model = self.make_reference().float()
        loss_of(batch_loss()(model, data(8, torch.float32).tensors)).backward()
        expected = checks.gradients(model)
        for gradients in self.everywhere(checks.single_precision):
            assert_same(gradients, expected)

    def test_parameters_of_several_types_have_the_gradients_of_one_device(self) -> None:
        model = checks.of_several_types(self.make_reference())
        loss_of(batch_loss()(model, data(8).tensors)).backward()
        expected = checks.gradients(model)
        assert len({grad.dtype for grad in expected.values()}) == 2
        for gradients in self.everywhere(checks.several_types):
            assert_same(gradients, expected)

    @pytest.mark.parametrize(("samples", "batch_size"), [(11, 4), (7, 3), (9, 8)])
    def test_uneven_batches_weigh_by_their_samples(self, samples: int, batch_size: int) -> None:
        expected = checks.reference_gradients(self, samples=samples, batch_size=batch_size)
        for gradients in self.everywhere(checks.train_gradients, samples, batch_size, "mean"):
            assert_same(gradients, expected)

    def test_without_a_share_the_losses_of_all_data_ranks_count_alike(self) -> None:
        for size, gradients in self.everywhere(checks.gradients_without_a_share):
            assert_same(gradients, checks.reference_gradients(self, samples=4 * size, batch_size=4 * size))

    def test_a_last_batch_of_one_sample_neither_hangs_nor_biases(self) -> None:
        expected = checks.reference_gradients(self, samples=5, batch_size=4)
        for gradients in self.everywhere(checks.train_gradients, 5, 4, "mean"):
            assert_same(gradients, expected)

    def test_a_loss_that_is_a_sum_gives_the_gradient_of_the_sum(self) -> None:
        expected = checks.reference_gradients(self, samples=7, batch_size=4, loss="sum")
        for gradients in self.everywhere(checks.train_gradients, 7, 4, "sum"):
            assert_same(gradients, expected)

    def test_a_step_that_returns_a_dict_has_the_gradient_of_its_loss(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(checks.dict_gradients):
            assert_same(gradients, expected)

    def test_accumulation_inside_no_sync_gives_the_gradient_of_the_whole(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(checks.accumulated_gradients):
            assert_same(gradients, expected)

    def test_inside_no_sync_nothing_is_reduced_over_ranks(self) -> None:
        reduced = checks.reference_gradients(self, samples=8, batch_size=8)
        for data_size, local in self.everywhere(checks.held_gradients):
            are_reduced = sorted(local) == sorted(reduced) and all(
                local[n].shape == g.shape and relative_error(g, local[n]) <= SAME.rtol
                for n, g in reduced.items()
            )
            assert data_size == 1 or not are_reduced

    def test_no_sync_ends_when_its_body_raises(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(checks.gradients_after_an_exception):
            assert_same(gradients, expected)

    def test_parameters_that_no_step_uses_stay_as_they_are(self) -> None:
        expected = checks.reference_with_unused(self)
        for weights in self.everywhere(checks.trained_with_unused):
            assert_same(weights, expected)

    def test_optimizer_steps_lead_to_the_weights_of_one_device(self) -> None:
        expected = checks.reference_weights(self)
        for weights in self.everywhere(checks.trained_weights):
            assert_same(weights, expected)

    def test_the_users_own_module_and_its_optimizer_are_what_is_trained(self) -> None:
        for is_own, are_its_parameters in self.everywhere(checks.who_is_trained):
            assert is_own, "unwrap() must return the module that prepare_model() was given"
            assert are_its_parameters, "prepare_optimizer() must return one over the prepared parameters"

    def test_ranks_that_start_with_different_weights_end_with_those_of_rank_0(self) -> None:
        expected = self.make_reference().state_dict()
        for state in self.everywhere(checks.start_from_different_weights):
            assert_same(state, expected)

    # -- Gradients between the backward pass and the optimizer --

    @pytest.mark.parametrize("norm_type", checks.NORMS)
    def test_clipping_uses_the_global_norm(self, norm_type: float) -> None:
        reference = checks.reference(self)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3, norm_type)
        for actual, gradients in self.everywhere(checks.clipped, norm_type):
            assert_same({"norm": actual}, {"norm": norm})
            assert_same(gradients, checks.gradients(reference))

    @pytest.mark.parametrize("norm_type", checks.NORMS)
    def test_the_global_norm_is_returned_and_nothing_is_scaled(self, norm_type: float) -> None:
        expected = checks.gradients(checks.reference(self))
        norm = nn.utils.get_total_norm(list(expected.values()), norm_type)
        for actual, clipped, gradients in self.everywhere(checks.norms, norm_type):
            assert_same({"norm": actual, "clipped": clipped}, {"norm": norm, "clipped": norm})
            assert_same(gradients, expected)

    def test_gradients_are_scaled(self) -> None:
        expected = {n: g * 0.5 for n, g in checks.gradients(checks.reference(self)).items()}
        for gradients in self.everywhere(checks.scaled):
            assert_same(gradients, expected)

    def test_gradients_are_limited_element_by_element(self) -> None:
        reference = checks.reference(self)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        for gradients in self.everywhere(checks.limited):
            assert_same(gradients, checks.gradients(reference))

    def test_a_parameter_that_is_not_finite_is_named(self) -> None:
        names = {n for n, p in self.make_reference().named_parameters() if p.requires_grad}
        named = self.everywhere(checks.not_finite)
        assert [before for before, _ in named] == [None] * len(named)
        assert {after for _, after in named} & names, "no rank has named the parameter"

    def test_what_is_not_finite_is_found_by_one_rank_without_the_others(self) -> None:
        for is_answered in self.everywhere(checks.asked_alone):
            assert is_answered, "find_nonfinite() waits for other ranks, which may not ask"

    def test_ranks_with_gradients_that_are_not_finite_agree_on_the_norm(self) -> None:
        for norm in self.everywhere(checks.norm_of_bad_gradients):
            assert not math.isfinite(norm)

    # -- Several models, parameter groups, schedulers and epochs --

    def test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean(self) -> None:
        for size, weights in self.everywhere(checks.trained_with_own_branches):
            assert_same(weights, checks.reference_with_branches(self, size))

    @pytest.mark.parametrize("mode", [True, False])
    def test_a_step_finds_the_model_in_the_mode_that_it_is_in(self, mode: bool) -> None:
        for first, modes in self.everywhere(checks.modes_in_steps, mode):
            assert first, "prepare_model() must leave the mode alone"
            assert modes == [mode] * len(modes), "run() must leave the mode alone"

    def test_all_that_a_step_returned_comes_back(self) -> None:
        for loss, others in self.everywhere(checks.returned):
            assert others == {"twice": pytest.approx(2 * loss), "more": pytest.approx(loss + 1)}

    def test_two_models_in_one_step_have_the_gradients_of_one_device(self) -> None:
        models = self.make_reference(), checks.shifted(self.make_reference())
        loss_of(checks.loss_of_two(*models, data(8).tensors)).backward()
        for of_models in self.everywhere(checks.gradients_of_two_models):
            if of_models is None:  # the backend runs a step on parts of the batch, which takes one model
                continue
            for model, gradients in zip(models, of_models, strict=True):
                assert_same(gradients, checks.gradients(model))

    def test_a_graph_that_is_to_be_retained_is_there_after_the_backward_pass(self) -> None:
        assert all(self.everywhere(checks.retains_the_graph))

    def test_an_optimizer_keeps_its_groups_with_their_options(self) -> None:
        model = self.make_reference()
        expected = checks.reference_trained(model, checks.grouped(model), epochs=2)
        for weights in self.everywhere(checks.trained_in_groups):
            assert_same(weights, expected)

    def test_a_scheduler_made_for_the_plain_optimizer_drives_the_prepared_one(self) -> None:
        model = self.make_reference()
        optimizer, scheduler = checks.scheduled(model)
        expected = checks.reference_trained(model, optimizer, after_step=scheduler.step)
        for weights in self.everywhere(checks.trained_on_schedule):
            assert_same(weights, expected)

    def test_a_stand_in_with_a_loss_that_is_not_finite_counts_as_nothing(self) -> None:
        expected = checks.reference_gradients(self, samples=5, batch_size=4)
        for gradients in self.everywhere(checks.gradients_beside_bad_stand_ins):
            assert_same(gradients, expected)

    def test_shuffled_epochs_have_the_order_of_the_seed_and_the_epoch(self) -> None:
        loader = PreparedLoader(DataLoader(data(12), batch_size=4, shuffle=True), seed=make_job(self).seed)
        expected = [[rows[0] for rows in loader] for _ in range(2)]
        epochs = dict(self.everywhere(checks.shuffled))  # by data rank
        for number, epoch in enumerate(expected):
            for index, rows in enumerate(epoch):
                # A backend may distribute the samples of a batch over its parts in any order.
                together = torch.cat([epochs[rank][number][index] for rank in sorted(epochs)])
                is_it = together.shape == rows.shape and torch.equal(sorted_rows(together), sorted_rows(rows))
                assert is_it, f"batch {index} of epoch {number} is not the one for (seed, epoch)"

    # -- Later optimizers, several optimizers, and frozen models --

    def test_an_optimizer_made_after_the_model_was_prepared_steps_it(self) -> None:
        self._check_weights(late=True, several=False)

    def test_several_optimizers_step_their_parts_of_a_model(self) -> None:
        self._check_weights(late=False, several=True)

    def _check_weights(self, *, late: bool, several: bool) -> None:
        model = self.make_reference()
        expected = checks.reference_trained(model, *checks.make_optimizers(model, several=several))
        for weights in self.everywhere(checks.trained, late, several):
            assert_same(weights, expected)

    def test_a_model_without_gradients_is_evaluated_as_it_is(self) -> None:
        with torch.no_grad():
            expected = self.make_reference()(data(8).tensors[0])
        for state, outputs in self.everywhere(checks.evaluated_frozen):
            assert_same(state, self.make_reference().state_dict())
            assert_same({"outputs": sorted_rows(outputs)}, {"outputs": sorted_rows(expected)})

    # -- Modes, random generators, settings of the process, and nested batches --

    @pytest.mark.parametrize("mode", checks.MODES)
    def test_a_step_runs_in_the_modes_of_its_caller(self, mode: str) -> None:
        for modes in self.everywhere(checks.modes, mode):
            assert modes == [checks.MODES[mode]] * len(modes), (
                "(gradients, autocast, type of a product) in the step"
            )

    def test_opening_and_preparing_draw_no_random_numbers(self) -> None:
        for changed in self.everywhere(checks.drawn):
            assert not changed, f"what the program draws next must not depend on it: {', '.join(changed)}"

    def test_a_session_leaves_the_process_as_it_found_it(self) -> None:
        # In new ranks: leftovers of an earlier session would count as there before.
        for changed in run_ranks(checks.left_behind, self.processes, self):
            assert not changed, f"after close() not as before: {', '.join(changed)}"

    def test_a_batch_of_any_structure_reaches_the_step_as_it_is(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(checks.gradients_of_nested_batches):
            assert_same(gradients, expected)

    # -- Ranks and collectives --

    def test_ranks_know_who_they_are(self) -> None:
        ranks = self.everywhere(checks.who)
        assert [who["rank"] for who in ranks] == list(range(self.processes))
        assert [who["is_main"] for who in ranks] == [rank == 0 for rank in range(self.processes)]
        assert {who["world_size"] for who in ranks} == {self.processes}
        assert all(who["local_rank"] == who["local_rank_of_launcher"] for who in ranks)
        assert all(0 <= who["data_rank"] < who["data_size"] for who in ranks)
        assert {who["data_rank"] for who in ranks} == set(range(ranks[0]["data_size"]))
        assert all(who["is_its_device"] for who in ranks), "it computes on a device that it was not given"

    def test_ranks_of_several_hosts_know_who_they_are(self) -> None:
        ranks = self.everywhere(checks.who_on_hosts)
        assert [who["rank"] for who in ranks] == list(range(self.processes))
        assert [who["is_main"] for who in ranks] == [rank == 0 for rank in range(self.processes)]
        assert [who["local_rank"] for who in ranks] == [0] * self.processes

    # Each operation with two types, each type with two operations or more; a mean of integers is no integer.
    @pytest.mark.parametrize(
        ("op", "dtype"),
        [
            ("sum", torch.float64),
            ("sum", torch.int64),
            ("mean", torch.float64),
            ("mean", torch.float32),
            ("min", torch.float64),
            ("min", torch.float32),
            ("max", torch.float64),
            ("max", torch.int64),
        ],
        ids=str,
    )
    def test_reduce_knows_every_operation(self, op: str, dtype: torch.dtype) -> None:
        for size, actual in self.everywhere(checks.reduced, op, dtype):
            values = torch.stack([checks.of_rank(rank, dtype) for rank in range(size)])
            assert_same({op: actual}, {op: checks.REDUCTIONS[op](values)}, depth="sum")

    def test_reduce_keeps_its_argument(self) -> None:
        assert all(self.everywhere(checks.kept_argument))

    def test_reduce_takes_a_scalar(self) -> None:
        for size, actual in self.everywhere(checks.reduced_scalar):
            torch.testing.assert_close(actual, torch.tensor(size * (size + 1) / 2, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("fewest", "dtype"),
        [(0, torch.float64), (1, torch.float32), (0, torch.int64), (1, torch.bool)],
        ids=str,
    )
    def test_gather_takes_uneven_lengths(self, fewest: int, dtype: torch.dtype) -> None:
        for size, actual in self.everywhere(checks.gathered, fewest, dtype):
            expected = torch.cat([checks.rows(rank, fewest, dtype) for rank in range(size)])
            torch.testing.assert_close(actual, expected)

    def test_gather_takes_scalars(self) -> None:
        for size, actual in self.everywhere(checks.gathered_scalars):
            torch.testing.assert_close(actual.reshape(-1), torch.arange(float(size)))

    @pytest.mark.parametrize("shape", [(2, 3, 2), (0, 3)], ids=str)
    def test_gather_and_reduce_take_any_shape_and_layout(self, shape: tuple[int, ...]) -> None:
        for size, gathered, reduced in self.everywhere(checks.of_shape, shape):
            parts = [checks.laid_out(shape, rank) for rank in range(size)]
            torch.testing.assert_close(gathered, torch.cat(parts))
            torch.testing.assert_close(reduced, torch.stack(parts).sum(0))

    def test_gather_objects_keeps_the_order_of_the_ranks(self) -> None:
        expected = [{"rank": rank, "text": "x" * rank} for rank in range(self.processes)]
        assert self.everywhere(checks.gathered_objects) == [expected] * self.processes

    def test_broadcast_gives_every_rank_the_object_of_its_source(self) -> None:
        expected = [{"from": source} for source in range(self.processes)]
        assert self.everywhere(checks.broadcast) == [expected] * self.processes

    def test_a_barrier_waits_for_every_rank(self, tmp_path: Any) -> None:
        log = tmp_path / "barrier"
        log.touch()
        self.everywhere(checks.meet, str(log))
        for round_ in range(self.processes):
            words = [word for number, _, word in checks.lines(log) if number == round_ and word != "turn"]
            assert words == ["before"] * self.processes + ["after"] * self.processes, (
                f"in round {round_} a rank went on before all had come"
            )

    def test_a_disagreement_raises_on_every_rank(self) -> None:
        for agreed, message in self.everywhere(checks.disagreed):
            assert agreed
            assert self.processes == 1 or "ranks disagree on the number" in message

    # -- Collectives of more than two ranks --

    def test_reductions_are_those_of_all_ranks_where_there_are_more_than_two(self) -> None:
        for exchanged in self.exchanged():
            values = torch.stack([checks.tensor_of(rank) for rank in range(exchanged["data_size"])])
            expected = {
                "sum": values.sum(0),
                "mean": values.mean(0),
                "min": values.amin(0),
                "max": values.amax(0),
            }
            for op, tensor in expected.items():
                torch.testing.assert_close(exchanged[op], tensor)

    def test_gathers_have_the_rows_of_all_ranks_where_there_are_more_than_two(self) -> None:
        for exchanged in self.exchanged():
            parts = [checks.tensor_of(rank)[:rank] for rank in range(exchanged["data_size"])]
            torch.testing.assert_close(exchanged["rows"], torch.cat(parts))

    def test_objects_come_from_every_rank_where_there_are_more_than_two(self) -> None:
        ranks = len(self.exchanged())
        for exchanged in self.exchanged():
            assert exchanged["objects"] == [str(rank) for rank in range(ranks)]
            assert exchanged["broadcasts"] == [str(source) for source in range(ranks)]

    # -- Shares of batches; the last one has fewer samples than there may be ranks --

    def test_in_training_every_rank_takes_every_step(self) -> None:
        for _, batches in self.everywhere(checks.yielded, True):
            assert len(batches) == 3

    @pytest.mark.parametrize("training", [True, False])
    def test_every_sample_counts_once(self, training: bool) -> None:
        yielded = self.everywhere(checks.yielded, training)
        shares = dict(yielded)  # ranks of one data rank read the same
        rows = [rows for batches in shares.values() for share, rows in batches if share.samples]
        assert sum(share.samples for batches in shares.values() for share, _ in batches) == checks.SAMPLES
        x = data(checks.SAMPLES).tensors[0]
        torch.testing.assert_close(sorted_rows(torch.cat(rows)), sorted_rows(x))

    def test_in_evaluation_every_rank_has_samples_of_every_batch(self) -> None:
        yielded = self.everywhere(checks.yielded, False)
        for _, batches in yielded:
            assert all(share.samples for share, _ in batches), "a sample would be met twice"
        assert len({len(batches) for _, batches in yielded}) == 1

    @pytest.mark.parametrize("samples", [1, 3])
    def test_evaluation_of_few_samples_neither_hangs_nor_counts_one_twice(self, samples: int) -> None:
        with torch.no_grad():
            expected = loss_of(batch_loss()(self.make_reference(), data(samples).tensors)).item()
        for counted, loss in self.everywhere(checks.evaluated, samples, 2):
            assert counted == samples
            assert loss == pytest.approx(expected, rel=SAME.rtol)

    def test_ranks_may_evaluate_different_numbers_of_batches_of_their_own(self) -> None:
        for size, counted, loss in self.everywhere(checks.evaluated_unevenly):
            parts = [data(checks.own_samples(rank)).tensors for rank in range(size)]
            with torch.no_grad():
                means = [loss_of(batch_loss()(self.make_reference(), part)).item() for part in parts]
            samples = [len(part[0]) for part in parts]
            assert counted == sum(samples)
            total = sum(n * mean for n, mean in zip(samples, means, strict=True))
            assert loss == pytest.approx(total / sum(samples), rel=SAME.rtol)

    def test_a_loader_that_is_split_already_is_taken_as_it_is(self) -> None:
        x = data(checks.SAMPLES).tensors[0]
        for rows in self.everywhere(checks.unsharded):
            torch.testing.assert_close(sorted_rows(rows), sorted_rows(x))

    def test_evaluation_sees_each_sample_once(self) -> None:
        with torch.no_grad():
            expected = loss_of(batch_loss()(self.make_reference(), data(11).tensors)).item()
        for samples, loss in self.everywhere(checks.evaluated, 11, 5):
            assert samples == 11
            assert loss == pytest.approx(expected, rel=SAME.rtol)

    # -- States, with the names of the user's own module --

    def test_model_state_has_the_plain_names_and_buffers_and_comes_back(self) -> None:
        expected = self.make_reference().state_dict()
        for state, restored in self.everywhere(checks.state_round_trip):
            assert_same(state, expected)
            assert_same(restored, expected)

    def test_a_state_of_one_device_is_loaded(self) -> None:
        expected = checks.of_one_device(self)
        for state in self.everywhere(checks.loaded):
            assert_same(state, expected)

    def test_the_parts_of_a_state_put_together_are_the_state(self) -> None:
        expected = self.make_reference().state_dict()
        for first, later in self.everywhere(checks.put_together):
            assert_same(first, expected)
            assert_same(later, checks.of_one_device(self))

    def test_buffers_that_steps_write_are_kept(self) -> None:
        for counts in self.everywhere(checks.counted_steps):
            assert counts == list(range(1, checks.STEPS + 1)), (
                "forward passes that the model's buffer has counted"
            )

    @pytest.mark.parametrize("fault", ["missing", "surplus", "another shape"])
    def test_a_state_that_does_not_fit_is_refused(self, fault: str) -> None:
        for error in self.everywhere(checks.loaded_wrong, fault):
            assert error, f"a state with a tensor that is {fault} was loaded"

    def test_a_model_that_was_built_without_memory_has_the_values_of_one_device(self) -> None:
        expected = self.make_reference().state_dict()
        for state in self.everywhere(checks.built_without_memory):
            assert_same(state, expected)

    def test_weights_that_are_tied_stay_tied(self) -> None:
        for before, after in self.everywhere(checks.count_of_weights):
            assert before == after

    def test_buffers_are_those_of_the_first_data_rank_after_they_are_synced(self) -> None:
        synced = self.everywhere(checks.synced_buffers)
        for buffers in synced:
            assert_same(buffers, checks.buffers(self.make_reference()))

    # -- Errors and lifetimes of sessions --

    def test_a_step_that_raises_is_raised_in_the_caller(self) -> None:
        for message in self.everywhere(checks.raising_step):
            assert "the step's own words" in message

    def test_a_wrapped_model_is_refused(self) -> None:
        for message in self.everywhere(checks.wrapped_model):
            assert "already wrapped" in message

    def test_an_unknown_option_is_refused(self) -> None:
        for message, is_joined in self.everywhere(checks.unknown_option):
            assert "no option 'no_such_option'" in message
            assert not is_joined, "the options must be looked at before anything is started"

    def test_closing_twice_does_nothing(self) -> None:
        assert all(self.everywhere(checks.closed_twice))

    def test_closing_leaves_the_process_group_as_it_was_found(self) -> None:
        for before, after in self.everywhere(checks.groups):
            assert before == after

    def test_a_process_group_of_the_programs_own_is_used_and_left_as_it_is(self) -> None:
        for is_the_same, total, size in self.everywhere(checks.within_a_group):
            assert is_the_same, "a group that the program has joined is the program's to leave"
            assert total == size

    def test_a_second_session_in_one_process_works_as_the_first(self) -> None:
        expected = checks.reference_gradients(self, samples=8, batch_size=8)
        for gradients in [*self.everywhere(checks.two_sessions), *self._launched(checks.two_sessions)]:
            for actual in gradients:
                assert_same(actual, expected)

    def _launched(self, body: Callable[..., Any]) -> list[Any]:
        """Run ``body(self)`` on ranks as under a launcher, with a store that survives a process group.

        A store that rank 0 serves ends with the group, so leftovers of a session could not disturb the next.
        """
        if self.processes == 1:
            return []
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        return run_ranks(body, self.processes, self, timeout_s=checks.MEETING_S, environ=environ)

    # -- Verdicts of ``assess()``, without side effects --

    def test_it_has_a_name_and_fits_the_job(self) -> None:
        assert isinstance(self.backend.name, str)
        assert self.backend.name
        for first, second in self.everywhere(checks.assessed_twice):
            assert first == second, "assess() must not depend on having been called before"
            assert isinstance(first, Verdict)
            assert first.is_fit, first.reason

    def test_assess_answers_where_no_model_is_known_yet(self) -> None:
        for verdict in self.everywhere(checks.assessed_without_a_model):
            assert isinstance(verdict, Verdict)

    def test_what_it_needs_of_memory_is_estimated_from_what_training_takes(self) -> None:
        for nothing, little, much in self.everywhere(checks.needs):
            assert nothing is None, "estimate_memory() has nothing to go by without a footprint"
            assert isinstance(little, MemoryNeed)
            assert isinstance(much, MemoryNeed)
            assert little.free == much.free == checks.FREE
            assert little.fits
            assert not much.fits, f"no device of {checks.FREE} bytes holds a thousandth of that model: {much}"

    def test_assess_changes_nothing_in_the_process(self) -> None:
        for effects in self.everywhere(checks.effects_of_assess):
            assert not effects, f"assess() must have no side effects: {', '.join(effects)}"

    def test_assess_leaves_the_model_alone(self) -> None:
        assert all(self.everywhere(checks.left_the_model_alone)), "assess() must not change the model"
