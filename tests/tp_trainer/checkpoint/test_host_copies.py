"""Copies of a state on the host: in the same buffers each time, also where no memory can be pinned."""

import torch
from tp_core.tensors import TensorSlice
from tp_trainer._checkpoint import _host_copies  # private: which memory copies have
from tp_trainer._checkpoint._host_copies import HostCopies


def tensors():
    whole = torch.arange(12.0).reshape(3, 4)
    part = TensorSlice((6, 4), [((3, 0), whole.clone())])
    return {"columns": whole.T, "none": torch.empty(0), "half": torch.ones(5).bfloat16(), "part": part}


def test_copies_have_the_numbers_of_now_in_the_memory_of_before():
    state, copies = tensors(), HostCopies()
    first = copies.take(state)
    state["columns"].add_(1)
    state["part"].parts[0][1].mul_(2)
    second = copies.take(state)
    assert second["columns"].data_ptr() == first["columns"].data_ptr() != state["columns"].data_ptr()
    assert torch.equal(second["columns"], state["columns"])
    assert torch.equal(second["part"].parts[0][1], state["part"].parts[0][1])
    state["half"] = torch.ones(7)  # another shape and type has a buffer of its own
    assert torch.equal(copies.take(state)["half"], torch.ones(7))


def test_where_no_memory_can_be_pinned_tensors_are_copied_one_by_one(monkeypatch):
    refused, empty = [], torch.empty

    def unpinned(*sizes, pin_memory=False, **options):
        if pin_memory:
            refused.append(sizes)
            raise RuntimeError
        return empty(*sizes, **options)

    monkeypatch.setattr(_host_copies, "uses_pinned_memory", lambda _: True)
    monkeypatch.setattr(torch, "empty", unpinned)
    found = HostCopies().take(tensors())
    assert len(refused) == 1
    assert torch.equal(found["columns"], tensors()["columns"])
    assert torch.equal(found["half"], tensors()["half"])
