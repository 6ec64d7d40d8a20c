"""Random numbers of workers and items, and which worker is asking."""

import functools
import random
import warnings

import numpy as np
import pytest
import torch
import tp_runner

METHODS = [
    {"start_method": "fork"},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"start_method": "spawn"}, marks=pytest.mark.nightly),
]
# Spawned workers take seconds to start, and get their numbers as the others do: one test of them is enough.
FEWER = [*METHODS[:2], pytest.param({"start_method": "spawn"}, marks=pytest.mark.nightly)]


def draw(_):
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draw_batch(batch):
    return [draw(item) for item in batch]


def identify(device):
    return torch.rand(3).tolist(), tp_runner.worker().number


def state(made, _):
    return made


@pytest.mark.parametrize("options", FEWER, ids=str)
def test_no_two_workers_nor_runs_have_the_same_numbers(options):
    np.random.rand()
    seen = [
        dict(tp_runner.map(_of_worker, range(40), n_workers=2, queue_scale=1, **options)) for _ in range(2)
    ]
    drawn = [numbers for run in seen for numbers in run.values()]
    assert len(drawn) >= 2
    for generator in zip(*drawn, strict=True):
        assert len(set(generator)) == len(drawn)


_first = {}


def _of_worker(_):
    number = tp_runner.worker().number
    return number, _first.setdefault(number, draw(None))


@pytest.mark.parametrize("options", [*METHODS, {"engine": "inline"}], ids=str)
def test_a_seed_makes_each_item_its_own_numbers_whatever_worker_takes_it(options):
    alone = list(tp_runner.map(draw, range(30), n_workers=1, seed=7, start_method="fork"))
    assert len(set(alone)) == 30
    assert list(tp_runner.map(draw, range(30), n_workers=3, seed=7, **options)) == alone


def test_another_seed_makes_other_numbers():
    one, other = (list(tp_runner.map(draw, range(5), n_workers=1, seed=s, engine="inline")) for s in (1, 2))
    assert not set(one) & set(other)


def test_a_seed_makes_each_batch_its_own_numbers():
    runs = [
        list(tp_runner.map(draw_batch, range(32), n_workers=n, seed=7, batch=4, start_method="fork"))
        for n in (1, 2)
    ]
    assert runs[0] == runs[1]


def test_an_item_that_is_tried_again_has_the_same_numbers(tmp_path):
    def work(item):
        drawn = draw(None)
        if item == 5 and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise ValueError
        return drawn

    plain = list(tp_runner.map(draw, range(10), n_workers=1, seed=3, start_method="fork"))
    again = tp_runner.map(work, range(10), n_workers=2, seed=3, max_retries=1, start_method="fork")
    assert list(again) == plain


def test_with_a_seed_every_worker_makes_the_same_model():
    options = {"n_workers": 2, "init": identify, "seed": 1, "queue_scale": 1, "start_method": "fork"}
    made = list(tp_runner.map(state, range(60), **options))
    assert len({tuple(weights) for weights, _ in made}) == 1


def test_the_caller_keeps_its_own_numbers():
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), float(torch.rand(()))
    random.seed(1)
    torch.manual_seed(1)
    list(tp_runner.map(draw, range(3), n_workers=1, seed=5, engine="inline"))
    assert (random.random(), float(torch.rand(()))) == expected


@pytest.mark.parametrize("options", [*METHODS[:2], {"engine": "thread"}, {"engine": "inline"}], ids=str)
def test_a_worker_knows_its_number(options):
    def who(_):
        me = tp_runner.worker()
        return me.number, me.count, me.device, me.seed

    assert set(tp_runner.map(who, range(60), n_workers=2, **options)) <= {
        (0, 2, "cpu", None),
        (1, 2, "cpu", None),
    }
    assert tp_runner.worker() is None


def draw_own(_):
    rng = tp_runner.item().rng
    return rng.random.random(), float(rng.numpy.random()), float(torch.rand((), generator=rng.torch))


@pytest.mark.parametrize(
    "options", [*FEWER, {"engine": "thread"}, {"start_method": "fork", "max_items_per_worker": 7}], ids=str
)
def test_the_generators_of_an_item_are_the_same_on_every_engine(options):
    alone = list(tp_runner.map(draw_own, range(30), seed=7, engine="inline", n_workers=1))
    assert len(set(alone)) == 30
    assert list(tp_runner.map(draw_own, range(30), n_workers=3, seed=7, **options)) == alone


def test_the_generators_of_an_item_go_on_within_it_and_are_not_the_global_ones():
    def work(_):
        own = [tp_runner.item().rng.random.random() for _ in range(2)]
        return [*own, random.random()]

    (numbers,) = tp_runner.map(work, [0], n_workers=1, seed=1, engine="inline")
    assert len(set(numbers)) == 3


@pytest.mark.parametrize("options", [{"start_method": "fork"}, {"engine": "thread"}], ids=str)
def test_without_a_seed_items_have_other_numbers_in_each_stream_and_the_same_in_each_attempt(
    options, tmp_path
):
    def work(item):
        numbers = draw_own(item)
        path = tmp_path / f"{item}-{tp_runner.item().seed}"
        if not path.exists():
            path.write_text(repr(numbers))
            raise ValueError(item)
        return path.read_text() == repr(numbers), numbers

    kind = type("Work", (tp_runner.OrderedRunner,), {"producer_work": staticmethod(lambda d, c, i: work(i))})
    with kind(2, max_retries=1, **options) as runner:
        results = [*runner.stream(range(8)), *runner.stream(range(8))]
    assert all(is_same for is_same, _ in results)
    assert len({numbers for _, numbers in results}) == 16


def test_a_seed_that_work_on_threads_draws_nothing_by_is_told(caplog):
    list(tp_runner.map(draw, range(9), n_workers=2, engine="thread", seed=1))
    assert [record.message.partition(" reaches")[0] for record in caplog.records] == ["seed=1"]
    caplog.clear()
    list(tp_runner.map(draw_own, range(9), n_workers=2, engine="thread", seed=1))
    assert not caplog.records


AT_MODULE_LEVEL = np.random.default_rng(0)
DRAW = random.Random(1).random
OF_TORCH = torch.Generator()


class Proxy:
    """Of what is not there yet, as web frameworks have them."""

    @property
    def __class__(self):
        raise RuntimeError("nothing is there")

    def __getattribute__(self, name):
        raise RuntimeError("nothing is there")


PROXY = Proxy()


class Holder:
    def __init__(self):
        self.rng = np.random.RandomState(0)

    def __call__(self, item):
        return self.rng.rand()


def from_module(_):
    return AT_MODULE_LEVEL.random()


def by_default(_, rng=AT_MODULE_LEVEL):
    return rng.random()


def from_closure():
    rng = random.Random(0)
    return lambda _: rng.random()


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (from_module, "AT_MODULE_LEVEL"),
        (lambda item: [from_module(item) for _ in range(2)], "AT_MODULE_LEVEL"),
        (lambda item: DRAW(), "DRAW"),
        (lambda item: torch.rand(1, generator=OF_TORCH), "OF_TORCH"),
        (from_closure(), "rng"),
        (by_default, "a default argument"),
        (functools.partial(by_default, rng=OF_TORCH), "by_default|partial"),
        (Holder(), "Holder.rng"),
    ],
    ids=["global", "nested", "method", "torch", "closure", "default", "partial", "object"],
)
def test_a_generator_that_each_worker_has_a_copy_of_is_reported(work, name):
    with pytest.warns(RuntimeWarning, match=f"draws from .*({name}).* has a copy") as caught:
        tp_runner.map(work, [1], n_workers=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_generators_of_configurations_stages_and_calls_are_reported():
    def draws(device, cfg, item):
        return cfg.rng.random()

    kind = type("Draws", (tp_runner.OrderedRunner,), {"producer_work": staticmethod(draws)})
    with pytest.warns(RuntimeWarning, match=r"cfg\.rng"):
        kind(2, {"rng": AT_MODULE_LEVEL}, start_method="fork").close()
    pipeline = tp_runner.Pipeline(n_workers=2, start_method="fork").map(from_module)
    with pytest.warns(RuntimeWarning, match="AT_MODULE_LEVEL"), pipeline:
        list(pipeline.stream([1]))
    with tp_runner.Executor(2, start_method="fork") as executor:
        with pytest.warns(RuntimeWarning, match="AT_MODULE_LEVEL") as caught:
            assert len([executor.submit(from_module, i).result() for i in range(5)]) == 5
        assert len(caught) == 1


def test_no_generator_is_reported_where_nothing_is_copied_or_drawn():
    rng = AT_MODULE_LEVEL

    def own(item):
        drawn = tp_runner.item().rng.random.random() + random.random() + np.random.rand() + torch.rand(())
        return drawn if item else PROXY

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"n_workers": 2}, {"n_workers": 1}, {"n_workers": 2, "engine": "thread"}):
            tp_runner.map(own, [1], **options)
            if options != {"n_workers": 2}:
                tp_runner.map(lambda _: rng.random(), [1], **options)
