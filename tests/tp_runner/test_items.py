"""What an input may be, and what work may be: datasets by their length, ``async def`` by its name."""

import functools
import re

import pytest
import tp_runner
from torch.utils.data import Dataset
from tp_core.errors import ConfigError, TpError
from tp_runner import Executor, OrderedRunner, Pipeline


class Squares(Dataset):
    """As torch's documents have it: no iterator, and no IndexError at its end."""

    def __len__(self):
        return 10

    def __getitem__(self, place):
        return place * place


def double(item):
    return 2 * item


DOUBLED = [2 * i * i for i in range(10)]


def by_map(options):
    return list(tp_runner.map(double, Squares(), n_workers=2, **options))


def by_stream(options):
    kind = type("Doubles", (OrderedRunner,), {"producer_work": staticmethod(lambda d, c, i: 2 * i)})
    with kind(2, **options) as runner:
        return list(runner.stream(Squares()))


def by_pipeline(options):
    with Pipeline(n_workers=2, **options).map(double) as pipeline:
        return list(pipeline.stream(Squares()))


def by_executor(options):
    with Executor(2, **options) as executor:
        return list(executor.map(double, Squares()))


@pytest.mark.parametrize("take", [by_map, by_stream, by_pipeline, by_executor])
def test_a_map_style_dataset_ends_at_its_length(take):
    assert take({"engine": "thread"}) == DOUBLED


def test_a_dataset_of_fixed_length_is_read_on_inline_and_processes_too():
    assert by_map({"engine": "inline"}) == by_map({"start_method": "fork"}) == DOUBLED


async def fetch(item):
    return item


async def several(item):
    yield item


class Fetcher:
    async def __call__(self, item):
        return item

    async def get(self, item):
        return item


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
@pytest.mark.parametrize(
    "work",
    [fetch, several, Fetcher(), Fetcher().get, functools.partial(fetch)],
    ids=lambda work: str(work)[:20],
)
def test_async_work_is_refused_by_name_on_every_engine(work, engine):
    options = {"engine": engine, "n_workers": 1}
    name = r"(fetch|several|Fetcher\.(__call__|get)) is async"
    with pytest.raises(ConfigError, match=name):
        tp_runner.map(work, [1], **options)


def test_async_parts_of_runners_pipelines_and_executors_are_refused():
    kind = type("Asks", (OrderedRunner,), {"producer_work": staticmethod(fetch)})
    with Executor(1, engine="thread") as executor:
        for refused in (
            lambda: kind(1, engine="thread"),
            lambda: Pipeline(n_workers=1).map(fetch),
            lambda: tp_runner.map(double, [1], init=fetch),
            lambda: tp_runner.map(double, [1], batch=2, collate=fetch),
            lambda: executor.submit(fetch, 1),
        ):
            with pytest.raises(ConfigError, match="fetch is async"):
                refused()


@pytest.mark.parametrize(
    "options", [{"start_method": "fork"}, {"engine": "thread"}, {"engine": "inline"}], ids=str
)
def test_what_nobody_awaits_is_the_items_failure(options):
    def one_fails(item):
        return fetch(item) if item < 5 else 1 / 0

    for work, more in (
        (lambda item: fetch(item + 1), {}),
        (lambda item: several(item + 1), {}),
        (lambda items: fetch(items[:]), {"batch": 3}),
        (one_fails, {"queue_scale": 6}),
    ):
        results = list(tp_runner.map(work, range(6), n_workers=1, on_error="return", **options, **more))
        assert all(isinstance(result, TpError) for result in results)
        assert re.search(r"(fetch|several) is async", str(results[0]))
