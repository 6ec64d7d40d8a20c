"""The backend: when it fits, and what its session does beyond the conformance kit."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tp_core import LaunchEnvironment
from tp_core.data import Parts
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.plugins import CollateAdapter, Job, Verdict, registry

from tests.installed import adapter_class, backend_class
from tests.reference_training import squared_error

TupleBackend = backend_class("tuple")
TupleCollateAdapter = adapter_class("tuple")

CPU = torch.device("cpu")


def job(count=2, environment=None, model=None, loss="mean", **options):
    return Job(
        devices=(CPU,) * count,
        environment=environment or LaunchEnvironment.read(),
        model=model,
        loss=loss,
        options={"tuple": options},
    )


def data(samples=7):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))


def opened(**options):
    return TupleBackend().open(job(**options))


def test_it_fits_several_devices_in_one_process():
    verdict = TupleBackend().assess(job(3))
    assert verdict.is_fit
    assert "3 devices in one process (cpu, cpu, cpu)" in verdict.reason


def test_it_does_not_fit_one_device_or_sharded_models_or_several_processes():
    assert "one device, cpu" in TupleBackend().assess(job(1)).reason
    model = nn.Linear(2, 2)
    model.weight.tp_sharded = True
    assert "sharded" in TupleBackend().assess(job(model=model)).reason
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    environment = LaunchEnvironment.read(environ)
    verdict = TupleBackend().assess(job(environment=environment))
    assert "launched as 2 processes" in verdict.reason
    assert "without a launcher" in verdict.remedy


def test_the_step_runs_on_each_device_with_its_part():
    seen = []

    def step(model, batch):
        seen.append(batch[0].shape[0])
        return squared_error(model, batch)

    with opened() as session:
        model = session.prepare_model(nn.Linear(3, 1))
        loader = session.prepare_loader(DataLoader(data(), 7))
        (batch,) = loader
        session.run(step, model, batch)
        assert loader.share.samples == 7
    assert sorted(seen) == [3, 4]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_logged_values_are_those_of_the_whole_batch(workers):
    def step(model, batch):
        x, _ = batch
        return {"loss": squared_error(model, batch), "rows": x, "mean": x.mean(), "n": 1.0, "nothing": None}

    context = "fork" if workers else None  # which takes a lambda along
    with opened(cost=lambda item: float(item[0].abs().sum())) as session:
        model = session.prepare_model(nn.Linear(3, 1))
        loader = DataLoader(data(), 7, num_workers=workers, multiprocessing_context=context)
        (batch,) = session.prepare_loader(loader)
        output = session.run(step, model, batch)
    assert batch.order is not None
    x = data().tensors[0]
    torch.testing.assert_close(output["rows"], x)
    torch.testing.assert_close(output["mean"], x.mean())
    assert output["n"] == 1.0
    assert output["nothing"] is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda x: {"loss": x.sum()} if len(x) == 4 else x.sum(),
            "returned a dict of .* for part 0 and a tensor",
        ),
        (lambda x: {"loss": x.sum(), str(len(x)): 1}, "for part 0 and a dict of"),
        (lambda x: "words", "'loss' must be a number or a tensor on every part, of one rank, got str"),
        (lambda x: x.sum() if len(x) == 4 else None, "got a tensor of shape .* NoneType"),
    ],
)
def test_outputs_that_do_not_go_together_are_refused(returned, message):
    with opened() as session:
        model = session.prepare_model(nn.Linear(3, 1))
        (batch,) = session.prepare_loader(DataLoader(data(), 7))
        with pytest.raises(StepError, match=message):
            session.run(lambda model, batch: returned(batch[0]), model, batch)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


@pytest.mark.parametrize("shard", [True, False])
def test_loaders_over_streams_are_split_too_and_counted_whole(shard):
    with opened() as session:
        loader = session.prepare_loader(DataLoader(Stream(), 4), shard=shard)
        counts = [(batch.counts, loader.share.samples) for batch in loader]
    assert counts == [((2, 2), 4), ((2, 1), 3)]


def test_the_users_loader_is_left_as_it_was():
    loader = DataLoader(data(), 4)
    before = loader.collate_fn
    with opened() as session:
        list(session.prepare_loader(loader, shard=False))
        list(session.prepare_loader(loader))
    assert loader.collate_fn is before


def test_parts_of_ones_own_are_taken_as_they_are():
    parts = Parts([data()[:3], data()[3:]], counts=[3, 4])
    with opened() as session:
        model = session.prepare_model(nn.Linear(3, 1))
        (batch,) = session.prepare_loader([parts])
        loss = session.run(squared_error, model, batch)
    torch.testing.assert_close(loss, squared_error(model, data()[:]))


def test_batches_without_parts_are_refused():
    with opened() as session:
        model = session.prepare_model(nn.Linear(3, 1))
        with pytest.raises(LoaderError, match="loader yielded list"):
            next(iter(session.prepare_loader([[1, 2]])))
        with pytest.raises(LoaderError, match="loader yielded tuple"):
            session.run(squared_error, model, data()[:])
        with pytest.raises(LoaderError, match="batch_size=None does not make lists of items"):
            session.prepare_loader(DataLoader(data(), batch_size=None))


def test_wrong_options_are_refused():
    for options, message in [
        ({"cost": 3}, "cost must be a function of an item, got 3"),
        ({"weights": [1]}, "2 parts need 2 weights"),
        ({"adapter": "nobody"}, "no collate adapter 'nobody' is installed; there are: 'tuple'"),
        ({"colour": 1}, "has no option 'colour'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            opened(**options)


class LastFirst(CollateAdapter):
    """An adapter that knows lists of tensors better."""

    name = "last-first"
    fits = True

    def assess(self, sample, parts):
        return Verdict.fits(90, "they are mine") if self.fits else Verdict.unfit("not mine")

    def adapt(self, collate_fn, *, parts, weights=None, cost=None):
        return lambda items: Parts(
            [collate_fn(items[-1:]), collate_fn(items[:-1])], counts=[1, len(items) - 1]
        )


def test_an_adapter_that_fits_the_samples_better_is_preferred():
    registry.register(LastFirst, name="last-first-plugin")
    try:
        for options, counts in [
            ({}, (1, 6)),
            ({"adapter": "tuple"}, (4, 3)),
            ({"adapter": "last-first"}, (1, 6)),
        ]:
            with opened(**options) as session:
                (batch,) = session.prepare_loader(DataLoader(data(), 7))
                assert batch.counts == counts
        LastFirst.fits = False
        with (
            opened(adapter="last-first") as session,
            pytest.raises(LoaderError, match="last-first: not mine"),
        ):
            list(session.prepare_loader(DataLoader(data(), 7)))
    finally:
        LastFirst.fits = True
        registry.unregister("last-first-plugin")


class Broken(TupleCollateAdapter):
    name = "broken"

    def assess(self, sample, parts):
        return sample["no such key"]


class Silent(TupleCollateAdapter):
    name = "silent"

    def assess(self, sample, parts):
        return None


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [(Broken, "assess() raised TypeError"), (Silent, "assess() must return a Verdict, got NoneType")],
)
def test_an_adapter_that_fails_is_left_out_and_named(adapter, reason, caplog):
    registry.register(adapter, name="failing-plugin")
    try:
        with opened() as session:
            (batch,) = session.prepare_loader(DataLoader(data(), 7))
    finally:
        registry.unregister("failing-plugin")
    assert batch.counts == (4, 3)
    assert (
        f"the collate adapter '{adapter.name}' of {adapter.__module__} is left out: {reason}" in caplog.text
    )


def test_the_adapter_splits_anything_and_keeps_counts():
    adapter = TupleCollateAdapter()
    assert adapter.assess(object(), 2).is_fit
    assert not adapter.assess(object(), 0).is_fit
    parts = adapter.adapt(list, parts=2, weights=[2, 1])(["a", "b", "c"])
    assert (tuple(parts), parts.counts) == ((["a", "b"], ["c"]), (2, 1))
    with pytest.raises(ConfigError, match="must be callable"):
        adapter.adapt(3, parts=2)


def test_closing_lets_the_replicas_go():
    import gc
    import weakref

    session = opened()
    model = session.prepare_model(nn.Linear(3, 1))
    reference = weakref.ref(session._replicas.get(model))
    session.close()
    gc.collect()
    assert reference() is None


def test_refreshing_a_model_lets_a_bare_write_reach_its_replicas():
    model = nn.Linear(3, 1)
    with opened(force_copies=True) as session, torch.no_grad():
        prepared = session.prepare_model(model)
        batch = Parts((torch.ones(2, 3), torch.ones(2, 3)), counts=(2, 2))
        session.run(lambda m, x: {"sum": m(x).sum()}, prepared, batch)
        model.weight.data.add_(1)
        session.refresh(prepared)
        seen = session.run(lambda m, x: {"sum": m(x).sum()}, prepared, batch)
        assert seen["sum"].item() == pytest.approx(model(torch.ones(2, 3)).sum().item())


# -- parts that are taken for a batch -----------------------------------------------------------------


def _a_batch(batch):
    """Return what a prepared loader yields for two devices."""
    with opened() as session:
        return next(iter(session.prepare_loader(DataLoader(batch, batch_size=4))))


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda batch: batch["x"], "has no 'x'"),
        (lambda batch: [row for (row,) in [batch]], "cannot be unpacked"),
        (lambda batch: torch.nn.functional.linear(batch, torch.ones(1, 1)), "is not a tensor"),
        (torch.nn.Linear(1, 1), "is not a tensor"),
        (lambda batch: torch.nn.functional.linear(torch.ones(1), weight=batch), "is not a tensor"),
        (lambda batch: torch.stack([torch.ones(1), batch]), "is not a tensor"),
    ],
)
def test_parts_that_are_used_as_a_batch_explain_themselves(use, what):
    with pytest.raises(StepError, match=rf"in 2 parts, .*{what}.*trainer\.run\(step, model, batch\)"):
        use(_a_batch([{"x": torch.ones(1)}] * 4))


def test_an_attribute_that_parts_lack_is_explained():
    batch = _a_batch([{"x": torch.ones(1)}] * 4)
    assert not hasattr(batch, "to")
    with pytest.raises(AttributeError, match=r"in 2 parts, .*has no attribute 'labels'"):
        _ = batch.labels


def test_parts_are_mapped_and_taken_by_number():
    parts = Parts([[1], [2, 3]], counts=[1, 2], order=[2, 0, 1])
    mapped = parts.map(len)
    assert (mapped[0], mapped[1], mapped[-1]) == (1, 2, 2)
    assert (mapped.counts, mapped.order) == ((1, 2), (2, 0, 1))
    with pytest.raises(StepError, match="has no 'x'"):
        _ = parts["x"]


def test_a_batch_in_parts_is_pickled():
    found = pickle.loads(pickle.dumps(_a_batch([{"x": torch.ones(1)}] * 4)))
    assert found.counts == (2, 2)
    assert torch.equal(found[1]["x"], torch.ones(2, 1))


def test_more_parts_than_devices_are_refused_by_a_sentence():
    loader = [Parts([torch.ones(1, 2)] * 3, counts=(1, 1, 1))]
    with (
        opened() as session,
        pytest.raises(LoaderError, match="3 parts, and each of the 2 devices"),
    ):
        next(iter(session.prepare_loader(loader)))


def test_what_is_no_batch_is_yielded_as_it_is_where_nothing_is_split():
    with opened() as session:
        assert list(session.prepare_loader(range(3), shard=False)) == [0, 1, 2]
        with pytest.raises(LoaderError, match="needs batches in parts"):
            list(session.prepare_loader(range(3)))
