"""Small programs, each in a right form and with one fault, of the kinds that users write.

A program returns what it computed and what it should have. `size` is the number of values of its tensors.
"""

import threading

import torch
from torch import nn

SIM = "sim:0"
OTHER = "sim:1"

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def side_stream(device=SIM):
    return torch.Stream(device=device)


def main_stream(device=SIM):
    return torch.accelerator.current_stream(device)


def event(device=SIM):
    return torch.Event(device=device)


def numbers(size):
    return torch.arange(float(size))


# -- Streams and events ---------------------------------------------------------------------------


@program
def a_side_stream_reads_what_the_main_one_makes(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM) * 2
    if not wrong:
        side.wait_stream(main_stream())
    with side:
        y = x + 1
    main_stream().wait_stream(side)
    return y.cpu(), numbers(size) * 2 + 1


@program
def the_main_stream_reads_what_a_side_stream_makes(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    with side:
        y = x * 3
    if not wrong:
        main_stream().wait_stream(side)
    z = y + 1
    main_stream().wait_stream(side)
    return z.cpu(), numbers(size) * 3 + 1


@program
def what_the_main_stream_reads_is_overwritten(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    y = x * 3
    if not wrong:
        side.wait_stream(main_stream())
    with side:
        x.zero_()
    main_stream().wait_stream(side)
    return y.cpu(), numbers(size) * 3


@program
def two_streams_write_one_buffer(wrong, size):
    first, second, x = side_stream(), side_stream(), torch.zeros(size, device=SIM)
    first.wait_stream(main_stream())
    second.wait_stream(main_stream())
    with first:
        x.fill_(1)
    if not wrong:
        second.wait_stream(first)
    with second:
        x.add_(1)
    main_stream().wait_stream(first)
    main_stream().wait_stream(second)
    return x.cpu(), torch.full((size,), 2.0)


@program
def an_event_is_recorded_after_the_work(wrong, size):
    side, x, done = side_stream(), numbers(size).to(SIM), event()
    side.wait_stream(main_stream())
    with side:
        if wrong:
            done.record(side)
        y = x * 5
        if not wrong:
            done.record(side)
    main_stream().wait_event(done)
    z = y + 1
    side.synchronize()
    return z.cpu(), numbers(size) * 5 + 1


@program
def the_stream_that_reads_waits_for_the_event(wrong, size):
    first, second, x = side_stream(), side_stream(), numbers(size).to(SIM)
    first.wait_stream(main_stream())
    with first:
        y = x * 5
    (main_stream() if wrong else second).wait_event(first.record_event())
    with second:
        z = y + 1
    main_stream().wait_stream(second)
    return z.cpu(), numbers(size) * 5 + 1


@program
def an_event_is_recorded_before_it_is_waited_for(wrong, size):
    side, x, done = side_stream(), numbers(size).to(SIM), event()
    side.wait_stream(main_stream())
    with side:
        y = x - 1
    if not wrong:
        done.record(side)
    main_stream().wait_event(done)
    z = y * 2
    side.synchronize()
    return z.cpu(), (numbers(size) - 1) * 2


@program
def the_reader_waits_for_the_writer(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    with side:
        y = x.exp()
    if wrong:
        side.wait_stream(main_stream())
    else:
        main_stream().wait_stream(side)
    z = y.log()
    side.synchronize()
    return z.cpu(), numbers(size).exp().log()


@program
def an_event_is_recorded_on_the_stream_of_the_work(wrong, size):
    side, x, done = side_stream(), numbers(size).to(SIM), event()
    third = side_stream()
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    done.record(main_stream() if wrong else side)
    third.wait_event(done)
    with third:
        z = y * 2
    main_stream().wait_stream(third)
    main_stream().wait_stream(side)
    return z.cpu(), numbers(size) * 4


@program
def an_event_is_recorded_again_for_each_use(wrong, size):
    side, x, done = side_stream(), numbers(size).to(SIM), event()
    side.wait_stream(main_stream())
    made, results = [], []
    for step in range(3):
        with side:
            made.append(x * step)
        if step == 0 or not wrong:
            done.record(side)
        main_stream().wait_event(done)
        results.append(made[-1] + 1)
    main_stream().wait_stream(side)
    return torch.stack(results).cpu(), torch.stack([numbers(size) * step + 1 for step in range(3)])


@program
def a_buffer_is_filled_again_once_it_was_read(wrong, size):
    side, buffer, results = side_stream(), torch.empty(size, device=SIM), []
    side.wait_stream(main_stream())
    for step in range(3):
        with side:
            buffer.fill_(step)
        main_stream().wait_stream(side)
        results.append(buffer * 2)
        if not wrong:
            side.wait_stream(main_stream())
    return torch.stack(results).cpu()[:, 0], torch.tensor([0.0, 2.0, 4.0])


@program
def a_sum_waits_for_both_of_its_terms(wrong, size):
    first, second, x = side_stream(), side_stream(), numbers(size).to(SIM)
    for stream in (first, second):
        stream.wait_stream(main_stream())
    with first:
        a = x + 1
    with second:
        b = x + 2
    main_stream().wait_stream(first)
    if not wrong:
        main_stream().wait_stream(second)
    c = a + b
    second.synchronize()
    return c.cpu(), numbers(size) * 2 + 3


@program
def the_third_of_three_stages_waits_for_the_second(wrong, size):
    first, second, third, x = side_stream(), side_stream(), side_stream(), numbers(size).to(SIM)
    first.wait_stream(main_stream())
    with first:
        a = x + 1
    second.wait_stream(first)
    with second:
        b = a * 2
    third.wait_stream(first if wrong else second)
    with third:
        c = b + a
    main_stream().wait_stream(third)
    main_stream().wait_stream(second)
    return c.cpu(), (numbers(size) + 1) * 3


@program
def halves_of_a_buffer_have_no_element_in_common(wrong, size):
    side, x, half = side_stream(), torch.zeros(size, device=SIM), size // 2
    side.wait_stream(main_stream())
    with side:
        x[:half].fill_(1)
    x[half - 1 if wrong else half :].fill_(2)
    main_stream().wait_stream(side)
    return x.cpu(), torch.cat([torch.ones(half), torch.full((size - half,), 2.0)])


@program
def columns_of_a_matrix_have_no_element_in_common(wrong, size):
    side, x = side_stream(), torch.zeros(size, 6, device=SIM)
    side.wait_stream(main_stream())
    with side:
        x[:, :3].fill_(1)
    x[:, 2 if wrong else 3 :].fill_(2)
    main_stream().wait_stream(side)
    return x.cpu(), torch.tensor([1.0, 1, 1, 2, 2, 2]).expand(size, 6)


@program
def gradients_are_added_up_in_order(wrong, size):
    side, total, part = side_stream(), torch.ones(size, device=SIM), torch.ones(size, device=SIM)
    side.wait_stream(main_stream())
    with side:
        total.add_(part)
    if not wrong:
        main_stream().wait_stream(side)
    total.add_(part)
    main_stream().wait_stream(side)
    return total.cpu(), torch.full((size,), 3.0)


@program
def a_step_on_a_side_stream_is_waited_for(wrong, size):
    side = side_stream()
    weight = nn.Parameter(torch.ones(size, device=SIM))
    (weight * 2).sum().backward()
    side.wait_stream(main_stream())
    with side, torch.no_grad():
        weight.sub_(weight.grad, alpha=0.5)
    if not wrong:
        main_stream().wait_stream(side)
    with torch.no_grad():
        out = weight * 1
    side.synchronize()
    return out.cpu(), torch.zeros(size)


@program
def memory_of_one_stream_is_waited_for_by_another(wrong, size):
    side, x = side_stream(), torch.ones(size, device=SIM)
    y = x * 2
    del y  # its memory belongs to the main stream, and is the next tensor's
    buffer = torch.empty(size, device=SIM)
    if not wrong:
        side.wait_stream(main_stream())
    with side:
        buffer.fill_(3)
    main_stream().wait_stream(side)
    return buffer.cpu(), torch.full((size,), 3.0)


@program
def a_copy_between_devices_waits_for_the_work(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    with side:
        y = x + 7
    if not wrong:
        main_stream().wait_stream(side)
    z = y.to(OTHER)
    side.synchronize()
    return z.cpu(), numbers(size) + 7


@program
def the_target_of_a_copy_between_devices_is_free(wrong, size):
    side, x, target = side_stream(OTHER), numbers(size).to(SIM), torch.ones(size, device=OTHER)
    side.wait_stream(main_stream(OTHER))
    with side:
        y = target * 2
    if not wrong:
        main_stream(OTHER).wait_stream(side)
    target.copy_(x)
    side.synchronize()
    return y.cpu(), torch.full((size,), 2.0)


@program
def threads_hand_over_with_an_event(wrong, size):
    ready, side, made = event(), side_stream(), []

    def produce():
        with side:
            made.append(torch.full((size,), 4.0, device=SIM) * 2)
            ready.record(side)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join()
    if not wrong:
        main_stream().wait_event(ready)
    out = made[0] + 1
    side.synchronize()
    return out.cpu(), torch.full((size,), 9.0)


@program
def the_answer_of_a_query_is_heeded(wrong, size):
    side, x, done = side_stream(), numbers(size).to(SIM), event()
    side.wait_stream(main_stream())
    with side:
        y = x
        for _ in range(8):
            y = y + 1
        done.record(side)
    while not done.query():
        if wrong:
            break
    z = y * 1
    side.synchronize()
    return z.cpu(), numbers(size) + 8


@program
def work_is_waited_for_after_its_launch(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    if wrong:
        side.synchronize()
    with side:
        y = x * 2
    if not wrong:
        side.synchronize()
    z = y + 1
    side.synchronize()
    return z.cpu(), numbers(size) * 2 + 1


@program
def backward_runs_where_the_forward_ran(wrong, size):
    side, x = side_stream(), torch.ones(size, device=SIM, requires_grad=True)
    side.wait_stream(main_stream())
    with side:
        loss = (x * x).sum()
    if not wrong:
        main_stream().wait_stream(side)
    grad = torch.ones((), device=SIM) * loss.detach()
    main_stream().wait_stream(side)
    side.wait_stream(main_stream())
    with side:
        loss.backward(grad)
    main_stream().wait_stream(side)
    return x.grad.cpu(), torch.full((size,), 2.0 * size)


# -- Memory that is freed -------------------------------------------------------------------------


@program
def memory_that_a_side_stream_uses_is_recorded(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM) + 1
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if not wrong:
        x.record_stream(side)
    del x
    z = torch.zeros(size, device=SIM)
    main_stream().wait_stream(side)
    return y.cpu() + z.cpu(), (numbers(size) + 1) * 2


@program
def memory_is_recorded_for_the_stream_that_uses_it(wrong, size):
    side, third, x = side_stream(), side_stream(), numbers(size).to(SIM) + 1
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    x.record_stream(third if wrong else side)
    del x
    z = torch.zeros(size, device=SIM)
    main_stream().wait_stream(side)
    return y.cpu() + z.cpu(), (numbers(size) + 1) * 2


@program
def the_tensor_that_is_used_is_the_one_recorded(wrong, size):
    side, x, w = side_stream(), numbers(size).to(SIM) + 1, torch.ones(size, device=SIM)
    side.wait_stream(main_stream())
    with side:
        y = x * w
    (w if wrong else x).record_stream(side)
    del x
    z = torch.zeros(size, device=SIM)
    main_stream().wait_stream(side)
    return y.cpu() + z.cpu(), numbers(size) + 1


@program
def memory_is_freed_after_the_wait(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM) + 1
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if wrong:
        del x
    main_stream().wait_stream(side)
    return y.cpu(), (numbers(size) + 1) * 2


@program
def a_temporary_of_a_function_outlives_its_use(wrong, size):
    side = side_stream()

    def start():
        temporary = numbers(size).to(SIM) - 3
        side.wait_stream(main_stream())
        with side:
            out = temporary.abs()
        return out, None if wrong else temporary

    out, kept = start()
    torch.ones(size, device=SIM)
    main_stream().wait_stream(side)
    del kept
    return out.cpu(), (numbers(size) - 3).abs()


@program
def a_storage_is_emptied_after_its_use(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM) + 1
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if not wrong:
        main_stream().wait_stream(side)
    x.untyped_storage().resize_(0)
    main_stream().wait_stream(side)
    return y.cpu(), (numbers(size) + 1) * 2


@program
def a_buffer_of_a_side_stream_is_recorded_for_the_main_one(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    main_stream().wait_stream(side)
    z = y + 1
    if not wrong:
        y.record_stream(main_stream())
    del y
    with side:
        other = torch.zeros(size, device=SIM)
    main_stream().wait_stream(side)
    return z.cpu() + other.cpu(), numbers(size) * 2 + 1


# -- Copies and pinned memory ---------------------------------------------------------------------


@program
def a_copy_to_the_host_is_waited_for(wrong, size):
    x = numbers(size).to(SIM) + 1
    host = x.to("cpu", non_blocking=True)
    if not wrong:
        main_stream().synchronize()
    return host.clone(), numbers(size) + 1


@program
def a_copy_into_pinned_memory_is_waited_for(wrong, size):
    x, host = numbers(size).to(SIM) + 1, torch.zeros(size, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if not wrong:
        torch.accelerator.synchronize(SIM)
    return host.clone(), numbers(size) + 1


@program
def the_device_that_copies_is_the_one_waited_for(wrong, size):
    x = numbers(size).to(SIM) + 1
    host = x.to("cpu", non_blocking=True)
    torch.accelerator.synchronize(OTHER if wrong else SIM)
    return host.clone(), numbers(size) + 1


@program
def the_event_of_a_copy_is_recorded_after_it(wrong, size):
    x, done = numbers(size).to(SIM) + 1, event()
    if wrong:
        done.record(main_stream())
    host = x.to("cpu", non_blocking=True)
    if not wrong:
        done.record(main_stream())
    done.synchronize()
    return host.clone(), numbers(size) + 1


@program
def losses_on_the_host_are_waited_for(wrong, size):
    x, losses = numbers(size).to(SIM), []
    for step in range(3):
        losses.append((x * step).sum().to("cpu", non_blocking=True))
    if not wrong:
        torch.accelerator.synchronize(SIM)
    return torch.stack(losses), torch.stack([(numbers(size) * step).sum() for step in range(3)])


@program
def pinned_memory_stays_until_its_copy_is_done(wrong, size):
    host = torch.ones(size).pin_memory()
    x = host.to(SIM, non_blocking=True)
    if not wrong:
        main_stream().synchronize()
    host.fill_(2)
    return x.cpu(), torch.ones(size)


@program
def a_pinned_buffer_is_filled_again_after_its_copy(wrong, size):
    host, results, done = torch.zeros(size, pin_memory=True), [], event()
    for step in range(3):
        if not wrong:
            done.synchronize()
        host.copy_(numbers(size) * step)
        results.append(host.to(SIM, non_blocking=True))
        done.record(main_stream())
    return torch.stack(results).cpu(), torch.stack([numbers(size) * step for step in range(3)])


@program
def a_ring_of_two_pinned_buffers_waits_for_the_older_one(wrong, size):
    ring, done, results = [torch.zeros(size, pin_memory=True) for _ in range(2)], [event(), event()], []
    for step in range(4):
        place = step % 2
        done[place].synchronize()
        ring[place].fill_(step)
        if wrong:
            done[place].record(main_stream())
        results.append(ring[place].to(SIM, non_blocking=True))
        if not wrong:
            done[place].record(main_stream())
    return torch.stack(results).cpu()[:, 0], torch.tensor([0.0, 1, 2, 3])


@program
def arrays_share_pinned_memory(wrong, size):
    host = torch.ones(size).pin_memory()
    array = host.numpy()
    x = host.to(SIM, non_blocking=True)
    if not wrong:
        main_stream().synchronize()
    array[0] = 5
    return x.cpu(), torch.ones(size)


@program
def a_prefetched_batch_is_waited_for(wrong, size):
    side, host = side_stream(), numbers(size).pin_memory()
    with side:
        batch = host.to(SIM, non_blocking=True)
    if not wrong:
        main_stream().wait_stream(side)
    out = batch * 2
    side.synchronize()
    return out.cpu(), numbers(size) * 2


@program
def a_batch_is_overwritten_once_it_was_used(wrong, size):
    side, batch, outs = side_stream(), torch.zeros(size, device=SIM), []
    hosts = [torch.full((size,), float(i)).pin_memory() for i in range(3)]
    side.wait_stream(main_stream())
    for host in hosts:
        with side:
            batch.copy_(host, non_blocking=True)
        main_stream().wait_stream(side)
        outs.append(batch + 1)
        if not wrong:
            side.wait_stream(main_stream())
    return torch.stack(outs).cpu()[:, 0], torch.tensor([1.0, 2, 3])


@program
def a_copy_to_the_host_on_a_side_stream_waits_for_the_work(wrong, size):
    side, x, host = side_stream(), numbers(size).to(SIM) * 3, torch.zeros(size, pin_memory=True)
    if not wrong:
        side.wait_stream(main_stream())
    with side:
        host.copy_(x, non_blocking=True)
    side.synchronize()
    return host.clone(), numbers(size) * 3


@program
def the_target_of_a_copy_to_the_host_is_left_alone(wrong, size):
    x, host = numbers(size).to(SIM) + 1, torch.zeros(size, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if wrong:
        host[0] = 3
    main_stream().synchronize()
    if not wrong:
        host[0] = 3
    expected = numbers(size) + 1
    expected[0] = 3
    return host.clone(), expected


@program
def weights_are_saved_before_the_next_step_changes_them(wrong, size):
    side, weight, host = side_stream(), torch.ones(size, device=SIM), torch.zeros(size, pin_memory=True)
    side.wait_stream(main_stream())
    with side:
        host.copy_(weight, non_blocking=True)
    if not wrong:
        main_stream().wait_stream(side)
    weight.add_(1)
    side.synchronize()
    return host.clone(), torch.ones(size)


# -- Random numbers -------------------------------------------------------------------------------


@program
def the_generator_that_draws_is_the_one_seeded(wrong, size):
    torch.sim.set_device(0)
    torch.sim.manual_seed(5)
    torch.sim.manual_seed_all(5)
    first = torch.rand(size, device=OTHER)
    torch.sim.manual_seed(5)
    if not wrong:
        torch.sim.manual_seed_all(5)
    return torch.rand(size, device=OTHER).cpu(), first.cpu()


@program
def a_state_goes_back_to_the_device_it_came_from(wrong, size):
    torch.sim.manual_seed_all(1)
    state = torch.sim.get_rng_state(1)
    first = torch.rand(size, device=OTHER)
    torch.sim.set_rng_state(state, 0 if wrong else 1)
    return torch.rand(size, device=OTHER).cpu(), first.cpu()


@program
def dropout_is_computed_again_with_its_state(wrong, size):
    x = torch.ones(64 * size, device=SIM)
    state = torch.sim.get_rng_state(0)
    first = nn.functional.dropout(x)
    if not wrong:
        torch.sim.set_rng_state(state, 0)
    return nn.functional.dropout(x).cpu(), first.cpu()


@program
def a_generator_is_of_the_device_that_draws(wrong, size):
    def draw():
        generator = torch.Generator("cpu" if wrong else "sim")
        return torch.rand(size, device=SIM, generator=generator.manual_seed(3))

    return draw().cpu(), draw().cpu()


@program
def forks_of_generators_have_all_devices(wrong, size):
    torch.manual_seed(2)
    first = torch.rand(size, device=OTHER)
    torch.manual_seed(2)
    with torch.random.fork_rng([0] if wrong else [0, 1], device_type="sim"):
        torch.rand(size, device=OTHER)
    return torch.rand(size, device=OTHER).cpu(), first.cpu()


@program
def the_state_of_each_device_is_its_own(wrong, size):
    torch.sim.manual_seed_all(3)
    torch.rand(size, device=OTHER)
    states = torch.sim.get_rng_state_all()
    first = torch.rand(size, device=OTHER)
    torch.sim.set_rng_state_all(states[:1] * 2 if wrong else states)
    return torch.rand(size, device=OTHER).cpu(), first.cpu()


# -- Indices of devices ---------------------------------------------------------------------------


@program
def operands_are_on_one_device(wrong, size):
    x, y = torch.ones(size, device=SIM), torch.ones(size, device=OTHER if wrong else SIM)
    return (x + y).cpu(), torch.full((size,), 2.0)


@program
def numbers_of_another_device_are_no_scalars(wrong, size):
    x, factor = torch.ones(size, device=SIM), torch.tensor(2.0, device=OTHER if wrong else "cpu")
    return (x * factor).cpu(), torch.full((size,), 2.0)


@program
def an_index_is_on_the_device_of_what_it_selects_from(wrong, size):
    x, index = numbers(size).to(SIM), torch.tensor([1, 0], device="cpu" if wrong else SIM)
    return x.index_select(0, index).cpu(), torch.tensor([1.0, 0.0])


@program
def the_current_device_is_the_one_of_the_context(wrong, size):
    with torch.sim.device(0 if wrong else 1):
        y = torch.ones(size, device="sim")
    return (y + torch.ones(size, device=OTHER)).cpu(), torch.full((size,), 2.0)


@program
def there_are_two_devices(wrong, size):
    return torch.ones(size, device="sim:2" if wrong else "sim:1").cpu(), torch.ones(size)


@program
def a_stream_is_of_the_device_that_works(wrong, size):
    side, x = side_stream(), numbers(size).to(SIM)
    side.wait_stream(main_stream())
    with side:
        y = x + 1
    done = event(OTHER if wrong else SIM)
    done.record(main_stream(OTHER) if wrong else side)
    main_stream().wait_event(done)
    z = y * 2
    side.synchronize()
    return z.cpu(), (numbers(size) + 1) * 2


@program
def a_thread_has_a_current_device_of_its_own(wrong, size):
    made = []

    def work():
        if not wrong:
            torch.sim.set_device(1)
        made.append(torch.ones(size, device="sim"))

    with torch.sim.device(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return (made[0] + torch.ones(size, device=OTHER)).cpu(), torch.full((size,), 2.0)


def outcome(name, *, wrong, size, seed):
    """Run a program under a seed; return what gave its fault away, or None."""
    import tp_simulator

    torch.sim.set_device(0)
    with tp_simulator.hostile(seed) as report:
        try:
            got, expected = PROGRAMS[name](wrong, size)
        except RuntimeError as error:
            return f"raised {error}".partition("\n")[0]
    if report.races:
        return "; ".join(report.races)
    return None if torch.equal(got, expected) else f"computed {got.tolist()[:4]} for {expected.tolist()[:4]}"
