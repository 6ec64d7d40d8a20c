"""The conformance kit of collate adapters passes a good one, and notices each way to be wrong."""

import random

import pytest
import torch
from tp_core.data import Parts
from tp_core.plugins import CollateAdapter, Verdict
from tp_testing import AdapterConformance


class Dealing(CollateAdapter):
    """Each sample goes to the part that is done with it first, the dearest samples before the others."""

    name = "dealing"

    def assess(self, sample, parts):
        return Verdict.fits(20, "any samples")

    def adapt(self, collate_fn, *, parts, weights=None, cost=None):
        def collate(items):
            hands = self.hands(items, parts, weights, cost)
            return self.parts([collate_fn([items[i] for i in hand]) for hand in hands], hands)

        return collate

    def hands(self, items, parts, weights, cost):
        costs = [1.0 if cost is None else cost(item) for item in items]
        hands = [[] for _ in range(min(parts, len(items)))]
        shares = weights or [1.0] * parts

        def finish(part, item):
            return (bool(hands[part]), (sum(costs[i] for i in hands[part]) + costs[item]) / shares[part])

        for item in sorted(range(len(items)), key=lambda i: -costs[i]):
            hands[min(range(len(hands)), key=lambda part: finish(part, item))].append(item)
        return [sorted(hand) for hand in hands]

    def parts(self, batches, hands):
        return Parts(batches, counts=[len(hand) for hand in hands], order=[i for hand in hands for i in hand])


class TestDealing(AdapterConformance):
    adapter = Dealing


class Nameless(Dealing):
    name = ""


class Choosy(Dealing):
    def assess(self, sample, parts):
        return Verdict.fits(20, "it has a number") if sample["number"] >= 0 else Verdict.unfit("it has none")


class Touching(Dealing):
    def assess(self, sample, parts):
        if isinstance(sample, dict):
            sample["seen"] = True
        return super().assess(sample, parts)


class Drawing(Dealing):
    def assess(self, sample, parts):
        torch.rand(1)
        return super().assess(sample, parts)


class Dropping(Dealing):
    def hands(self, items, parts, weights, cost):
        each = len(items) // parts or 1
        return [list(range(i * each, (i + 1) * each)) for i in range(min(parts, len(items)))]


class Repeating(Dealing):
    def hands(self, items, *rest):
        first, *others = super().hands(items, *rest)
        return [[*first, first[0]], *others]


class LeavingSomeEmpty(Dealing):
    def hands(self, items, parts, weights, cost):
        hands = super().hands(items, parts, weights, cost)
        return hands + [[] for _ in range(parts - len(hands))]

    def adapt(self, collate_fn, **settings):
        return super().adapt(
            lambda items: collate_fn(items) if items else {"number": torch.ones(0)}, **settings
        )


class Idle(Dealing):
    def hands(self, items, parts, weights, cost):
        return super().hands(items, max(1, parts - 1), None, cost)


class Miscounting(Dealing):
    def parts(self, batches, hands):
        return Parts(batches, counts=[1] * len(hands), order=[i for hand in hands for i in hand])


class NotTellingTheOrder(Dealing):
    def parts(self, batches, hands):
        return Parts(batches, counts=[len(hand) for hand in hands])


class TellingTheInverse(Dealing):
    def parts(self, batches, hands):
        order = [i for hand in hands for i in hand]
        return Parts(
            batches, counts=[len(h) for h in hands], order=[order.index(i) for i in range(len(order))]
        )


class Bare(Dealing):
    def parts(self, batches, hands):
        return tuple(batches)


class Collating(Dealing):
    """Knows better than the user how to make a batch."""

    def adapt(self, collate_fn, **settings):
        return super().adapt(torch.utils.data.default_collate, **settings)


class Rounding(Dealing):
    def parts(self, batches, hands):
        return super().parts([{**batch, "x": batch["x"].half()} for batch in batches], hands)


class GivingTuples(Dealing):
    def adapt(self, collate_fn, **settings):
        return super().adapt(lambda items: collate_fn(tuple(items)), **settings)


class IgnoringWeights(Dealing):
    def hands(self, items, parts, weights, cost):
        return super().hands(items, parts, None, cost)


class IgnoringCosts(Dealing):
    def hands(self, items, parts, weights, cost):
        each = -(-len(items) // parts)
        return [list(range(i, min(i + each, len(items)))) for i in range(0, len(items), each)]


class Chancy(Dealing):
    def hands(self, items, parts, weights, cost):
        rows = random.sample(range(len(items)), len(items))
        return [rows[part::parts] for part in range(min(parts, len(items)))]


class Shuffling(Dealing):
    """Alike every time, and draws from the user's generator for it."""

    def hands(self, items, *rest):
        torch.randperm(len(items))
        return super().hands(items, *rest)


class Emptying(Dealing):
    def adapt(self, collate_fn, **settings):
        adapted = super().adapt(collate_fn, **settings)

        def collate(items):
            parts = adapted(items)
            items.reverse()
            return parts

        return collate


class Swallowing(Dealing):
    def adapt(self, collate_fn, **settings):
        adapted = super().adapt(collate_fn, **settings)

        def collate(items):
            try:
                return adapted(items)
            except LookupError:
                return Parts([], counts=[])

        return collate


ORDER = {"count": 7, "parts": 3, "costs": False}


@pytest.mark.parametrize(
    ("adapter", "test", "arguments"),
    [
        (Nameless, "it_has_a_name_and_fits_its_samples", {}),
        (Choosy, "it_has_an_answer_for_samples_of_any_kind", {"sample": None}),
        (Touching, "assessing_changes_nothing", {}),
        (Drawing, "assessing_changes_nothing", {}),
        (Dropping, "every_sample_is_in_one_part", {"count": 5, "parts": 2}),
        (Repeating, "every_sample_is_in_one_part", {"count": 5, "parts": 2}),
        (LeavingSomeEmpty, "every_sample_is_in_one_part", {"count": 2, "parts": 3}),
        (Idle, "every_sample_is_in_one_part", {"count": 5, "parts": 2}),
        (Bare, "every_sample_is_in_one_part", {"count": 5, "parts": 2}),
        (Miscounting, "the_counts_are_those_of_the_parts", {"count": 5, "parts": 2}),
        (NotTellingTheOrder, "the_order_is_where_each_sample_stood", ORDER),
        (TellingTheInverse, "the_order_is_where_each_sample_stood", ORDER),
        (Collating, "each_part_is_what_the_collate_function_makes", {}),
        (Rounding, "each_part_is_what_the_collate_function_makes", {}),
        (GivingTuples, "each_part_is_what_the_collate_function_makes", {}),
        (IgnoringWeights, "weights_are_the_shares_of_the_parts", {}),
        (IgnoringCosts, "with_costs_no_part_has_much_more_than_its_share", {}),
        (Chancy, "the_same_samples_make_the_same_parts_again", {}),
        (Shuffling, "the_same_samples_make_the_same_parts_again", {}),
        (Emptying, "the_users_list_is_left_as_it_is", {}),
        (Swallowing, "an_error_of_the_collate_function_is_raised", {}),
    ],
)
def test_an_altered_adapter_is_caught(adapter, test, arguments):
    kit = TestDealing()
    getattr(kit, f"test_{test}")(**arguments)
    kit.adapter = adapter
    with pytest.raises((AssertionError, pytest.fail.Exception, TypeError)):
        getattr(kit, f"test_{test}")(**arguments)
