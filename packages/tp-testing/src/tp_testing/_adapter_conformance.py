"""The conformance tests of collate adapters, for their authors to subclass."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch
from tp_core.data import Parts
from tp_core.plugins import CollateAdapter, Verdict

from tp_testing._kit import DeclaredLimits


class AdapterConformance(DeclaredLimits):
    """The tests of every collate adapter. A subclass, in a test module, names the adapter.

    Every sample is in one part, with the right counts and order. Each part is the result of the user's
    function, and the split respects weights and costs. An adapter for another kind of samples overrides
    :meth:`make_samples`, :meth:`collate` and :meth:`numbers`.

    Attributes:
        adapter: The adapter under test.

    Example:
        >>> class TestMine(AdapterConformance):
        ...     adapter = MyAdapter
    """

    adapter: ClassVar[type[CollateAdapter]]

    def subject(self) -> str:
        """Return the name of the adapter."""
        return self.adapter.name

    def make_samples(self, count: int) -> list[Any]:
        """Return samples with a different number each, from 0, all of about the same size."""
        return [{"x": torch.full((3,), float(number)), "number": number} for number in range(count)]

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of a list of samples, as a user's collate function does."""
        return torch.utils.data.default_collate(samples)

    def numbers(self, batch: Any) -> list[int]:
        """Return the numbers of a batch's samples, in its order."""
        numbers: list[int] = batch["number"].tolist()
        return numbers

    def same(self, first: Any, second: Any) -> bool:
        """Return whether two batches have the same contents; override it for other kinds of batches."""
        return _same(first, second)

    # -- the tests ------------------------------------------------------------------------------

    def test_it_has_a_name_and_fits_its_samples(self) -> None:
        adapter = self.adapter()
        assert isinstance(adapter.name, str)
        assert adapter.name
        verdict = adapter.assess(self.make_samples(1)[0], 2)
        assert isinstance(verdict, Verdict)
        assert verdict.is_fit, verdict.reason
        assert verdict.reason

    @pytest.mark.parametrize("sample", [None, "a text", 3, object(), {}], ids=type)
    def test_it_has_an_answer_for_samples_of_any_kind(self, sample: Any) -> None:
        """Assess odd samples, as every installed adapter is called with the samples of every loader."""
        assert isinstance(self.adapter().assess(sample, 2), Verdict)

    def test_assessing_changes_nothing(self) -> None:
        sample = self.make_samples(1)[0]
        before, generator = pickle.dumps(sample), torch.get_rng_state()
        adapter = self.adapter()
        first, second = adapter.assess(sample, 2), adapter.assess(sample, 2)
        assert first == second, "assess() must not depend on having been called before"
        assert pickle.dumps(sample) == before, "assess() must not change the sample"
        assert torch.equal(torch.get_rng_state(), generator), "assess() must not draw random numbers"

    @pytest.mark.parametrize(("count", "parts"), [(1, 1), (6, 1), (1, 3), (2, 3), (5, 2), (7, 3), (16, 4)])
    def test_every_sample_is_in_one_part(self, count: int, parts: int) -> None:
        made = self._split(count, parts=parts)
        assert isinstance(made, Parts), f"expected tp_core.data.Parts, got {type(made).__name__}"
        numbers = [self.numbers(part) for part in made]
        assert sorted(chain(*numbers)) == list(range(count))
        assert all(numbers), "a part without samples has no loss; make fewer parts"
        assert len(made) == min(parts, count), "a device is left idle, or there are too many parts"

    @pytest.mark.parametrize(("count", "parts"), [(2, 3), (5, 2), (7, 3)])
    def test_the_counts_are_those_of_the_parts(self, count: int, parts: int) -> None:
        made = self._split(count, parts=parts)
        assert made.counts == tuple(len(self.numbers(part)) for part in made)

    @pytest.mark.parametrize(("count", "parts"), [(6, 1), (5, 2), (7, 3)])
    @pytest.mark.parametrize("costs", [False, True], ids=["plain", "costs"])
    def test_the_order_is_where_each_sample_stood(self, count: int, parts: int, *, costs: bool) -> None:
        cost = self._cost if costs else None
        made = self._split(count, parts=parts, cost=cost)
        numbers = list(chain(*(self.numbers(part) for part in made)))
        if made.order is None:
            order = list(range(count))
        else:
            order = list(made.order)
        assert numbers == order, "where the parts change the order, Parts(..., order=) must have it"

    def test_each_part_is_what_the_collate_function_makes(self) -> None:
        made_by_it: list[Any] = []

        def collate(samples: list[Any]) -> Any:
            assert isinstance(samples, list), f"collate functions take lists, got {type(samples).__name__}"
            made_by_it.append(self.collate(samples))
            return made_by_it[-1]

        samples = self.make_samples(7)
        made = self.adapter().adapt(collate, parts=3)(samples)
        assert made_by_it, "the user's collate function was not called"
        for part in made:
            assert type(part) is type(made_by_it[0])
            alone = self.collate([samples[number] for number in self.numbers(part)])
            assert self.same(part, alone), "the part is not what the function makes of its samples"

    def test_weights_are_the_shares_of_the_parts(self) -> None:
        made = self._split(32, parts=2, weights=(3.0, 1.0))
        assert abs(made.counts[0] - 24) <= 4, f"weights 3 and 1 of 32 samples made {made.counts}"

    def test_with_costs_no_part_has_much_more_than_its_share(self) -> None:
        count, parts = 24, 3
        made = self._split(count, parts=parts, cost=self._cost)
        assert len(made) == parts
        loads = [sum(map(_cost_of, self.numbers(part))) for part in made]
        # The bound of any rule that gives the next sample to the part with the least load (Graham, 1969).
        allowed = sum(loads) / parts + max(map(_cost_of, range(count)))
        assert max(loads) <= allowed, f"costs of the parts: {loads}"

    def test_the_same_samples_make_the_same_parts_again(self) -> None:
        generator = torch.get_rng_state()
        samples = self.make_samples(9)
        adapted = self.adapter().adapt(self.collate, parts=2)
        first, second = adapted(samples), adapted(samples)
        other = self.adapter().adapt(self.collate, parts=2)(samples)
        expected = [self.numbers(part) for part in first]
        assert [self.numbers(part) for part in second] == expected, "runs could not be resumed"
        assert [self.numbers(part) for part in other] == expected, "ranks and workers would differ"
        assert torch.equal(torch.get_rng_state(), generator), "the parts must not be drawn by chance"

    def test_the_users_list_is_left_as_it_is(self) -> None:
        samples = self.make_samples(6)
        before = list(map(id, samples))
        self.adapter().adapt(self.collate, parts=2, cost=self._cost)(samples)
        assert list(map(id, samples)) == before

    def test_an_error_of_the_collate_function_is_raised(self) -> None:
        def collate(samples: list[Any]) -> Any:
            msg = f"{len(samples)} samples do not go together"
            raise LookupError(msg)

        with pytest.raises(LookupError, match="do not go together"):
            self.adapter().adapt(collate, parts=2)(self.make_samples(4))

    def _split(
        self,
        count: int,
        *,
        parts: int,
        weights: Sequence[float] | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> Parts:
        adapted = self.adapter().adapt(self.collate, parts=parts, weights=weights, cost=cost)
        return adapted(self.make_samples(count))

    def _cost(self, sample: Any) -> float:
        return _cost_of(self.numbers(self.collate([sample]))[0])


def _cost_of(number: int) -> float:
    return 1.0 + number


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
