"""A loader that is iterated within an iteration over it, as by an evaluation within an epoch."""

import pytest
from torch.utils.data import DataLoader
from tp_core.data import PreparedLoader


def loader(**options):
    return PreparedLoader(DataLoader(range(22), batch_size=4, shuffle=True, **options), seed=1)


def epoch(number):
    prepared = loader()
    prepared.set_epoch(number)
    return [batch.tolist() for batch in prepared]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("most", [1, 3, 99])
def test_each_iteration_has_the_samples_of_its_own_epoch(workers, most):
    prepared, outer = loader(num_workers=workers), []
    for number, batch in enumerate(prepared):
        outer.append(batch.tolist())
        if number == 1:
            inner = [b.tolist() for _, b in zip(range(most), prepared, strict=False)]
    assert outer == epoch(0)
    assert inner == epoch(1)[:most]


def test_the_iteration_that_goes_on_is_the_one_that_is_saved():
    prepared = loader()
    for number, _ in enumerate(prepared):
        if number == 2:
            break_at = prepared.state_dict()
            for _ in prepared:
                pass
            prepared.set_epoch(1)
            assert prepared.state_dict() == break_at
            assert prepared.share.samples == 4
            break
