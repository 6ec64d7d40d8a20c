"""How memory is handed out, and who may touch it."""

import pytest
import torch
import tp_simulator

pytestmark = pytest.mark.simulated

MIB = 2**20
DEVICE = "sim:1"  # the other tests use sim:0


def _bytes(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


def _fresh():
    torch.accelerator.synchronize(DEVICE)
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats(DEVICE)
    assert torch.sim.memory_allocated(DEVICE) == 0
    assert torch.sim.memory_reserved(DEVICE) == 0


def test_blocks_are_multiples_of_512_bytes():
    _fresh()
    kept = []
    for nbytes, block in ((1, 512), (512, 512), (513, 1024), (5000, 5120)):
        before = torch.sim.memory_allocated(DEVICE)
        kept.append(_bytes(nbytes))
        assert torch.sim.memory_allocated(DEVICE) - before == block
    assert torch.sim.memory_stats(DEVICE)["requested_bytes.all.current"] == 1 + 512 + 513 + 5000


def test_segments_are_of_2_and_20_mib_or_the_next_multiple_of_2():
    for nbytes, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12)):
        _fresh()
        kept = _bytes(nbytes)
        assert torch.sim.memory_reserved(DEVICE) == segment * MIB
        del kept


def test_a_segment_is_shared_and_kept():
    _fresh()
    kept = [_bytes(MIB // 2) for _ in range(4)]
    assert torch.sim.memory_reserved(DEVICE) == 2 * MIB
    kept.append(_bytes(1))
    assert torch.sim.memory_reserved(DEVICE) == 4 * MIB
    kept.clear()
    assert torch.sim.memory_reserved(DEVICE) == 4 * MIB
    assert torch.sim.max_memory_allocated(DEVICE) == 2 * MIB + 512
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved(DEVICE) == 0
    assert torch.sim.max_memory_reserved(DEVICE) == 4 * MIB


def test_neighbours_that_are_free_are_joined():
    _fresh()
    parts = [_bytes(MIB // 2) for _ in range(4)]
    del parts[1:3]
    whole = _bytes(MIB)
    assert torch.sim.memory_reserved(DEVICE) == 2 * MIB
    del whole


def test_fragments_hold_memory_that_nothing_fits_into():
    _fresh()
    blocks = [_bytes(5 * MIB) for _ in range(8)]  # two segments of 20 MiB
    del blocks[::2]
    assert torch.sim.memory_reserved(DEVICE) - torch.sim.memory_allocated(DEVICE) == 20 * MIB
    tp_simulator.limit_memory(45 * MIB, DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8.00 MiB.* 20.00 MiB is reserved"):
        _bytes(8 * MIB)
    tp_simulator.limit_memory(2**34, DEVICE)


def test_memory_of_a_stream_is_not_the_memory_of_another():
    _fresh()
    side = torch.Stream(device=DEVICE)
    kept = _bytes(1)
    del kept
    with side:
        kept = _bytes(1)
    assert torch.sim.memory_reserved(DEVICE) == 4 * MIB
    del kept


def test_too_much_is_refused_in_torchs_words_and_what_is_cached_is_given_back_first():
    _fresh()
    refused = torch.sim.memory_stats(DEVICE)["num_ooms"]
    tp_simulator.limit_memory(64 * MIB, DEVICE)
    assert torch.sim.mem_get_info(DEVICE) == (64 * MIB, 64 * MIB)
    kept = _bytes(60 * MIB)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"sim out of memory. Tried to allocate 40.00 MiB. sim:1 has"
    ):
        _bytes(40 * MIB)
    del kept
    assert torch.sim.memory_reserved(DEVICE) == 60 * MIB
    kept = _bytes(62 * MIB)
    assert kept.nbytes == torch.sim.memory_reserved(DEVICE) == 62 * MIB
    assert torch.sim.memory_stats(DEVICE)["num_ooms"] == refused + 1
    tp_simulator.limit_memory(2**34, DEVICE)


def test_recorded_memory_is_handed_out_once_its_streams_are_done():
    _fresh()
    side = torch.Stream(device=DEVICE)
    with tp_simulator.hostile() as report:
        x = torch.ones(128, device=DEVICE)
        place = x.data_ptr()
        side.wait_stream(torch.accelerator.current_stream(DEVICE))
        with side:
            x * 2
        x.record_stream(side)
        del x
        assert torch.empty(128, device=DEVICE).data_ptr() != place
        side.synchronize()
        assert torch.empty(128, device=DEVICE).data_ptr() == place
    assert report.races == ()


def test_memory_that_was_freed_reads_as_nan():
    _fresh()
    x = torch.ones(128, device=DEVICE)
    place = x.data_ptr()
    del x
    y = torch.empty(128, device=DEVICE)
    assert y.data_ptr() == place
    assert y.isnan().all()


def test_a_storage_can_be_emptied_and_filled_again():
    x = torch.ones(100, device=DEVICE)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(400)
    x.fill_(3)
    x.resize_(200)
    assert x[:100].tolist() == [3.0] * 100
    y = torch.empty(0, device=DEVICE)
    y.set_(x.untyped_storage(), 10, (5,), (2,))
    assert y.tolist() == [3.0] * 5
    assert torch.empty(0, device=DEVICE).set_(x).data_ptr() == x.data_ptr()


def test_a_tensor_of_the_device_is_no_array():
    with pytest.raises(TypeError, match=r"can't convert sim:1 device type tensor to numpy"):
        torch.ones(3, device=DEVICE).numpy()


def test_memory_is_pinned_for_the_device():
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.zeros(3).pin_memory().is_pinned()
    assert not torch.zeros(3).is_pinned()
    assert torch.ones(3, device=DEVICE).to("cpu", non_blocking=True).is_pinned()
