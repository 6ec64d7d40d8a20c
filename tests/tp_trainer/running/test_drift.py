"""Parameters that ranks hold in common stay equal, or the program is told which one does not."""

import logging
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import DisagreementError
from tp_testing import run_ranks
from tp_trainer import Callback, Trainer
from tp_trainer._running._drift import DriftWatch  # private: no public name sums

WORDS = "hold different values of the"


def make_model(*, dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(dropout), nn.Linear(5, 1))


def loader():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def step(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def lines_of(run, *args, **kwargs):
    """Return the warnings of a run that name a parameter, without what follows its name."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_trainer").addHandler(handler)
    try:
        run(*args, **kwargs)
    finally:
        logging.getLogger("tp_trainer").removeHandler(handler)
    return [re.split(", which they should|: forward writes", line)[0] for line in lines if WORDS in line]


class InitializesLayer(Callback):
    """Draws a layer anew within a run, from the rank's own numbers or from common ones."""

    def __init__(self, *, draws_common=False):
        self.draws_common = draws_common

    def on_step_end(self, run):
        if run.step == 2:
            generator = torch.Generator().manual_seed(run.step) if self.draws_common else None
            with torch.no_grad():
                run.model[2].weight.uniform_(-1, 1, generator=generator)


class AddsNoise(Callback):
    def on_optimizer_step(self, run, grad_norm):
        for parameter in run.model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=0.01)


def draws_before(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.add_(torch.randn(parameter.shape), alpha=0.1)


def fitted(backend, folder=None, *, make_callback=None, hooks=False, dropout=0.0, options=None):
    model = make_model(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if hooks:
        optimizer.register_step_pre_hook(draws_before)
    callbacks = [] if make_callback is None else [make_callback()]
    with Trainer(seed=0, devices="cpu", backend=backend, options=options, progress=False) as trainer:
        trainer.fit(model, optimizer, loader(), step=step, epochs=3, callbacks=callbacks, checkpoint=folder)


class Codebook(nn.Module):
    """Has frozen parameters: one that forward replaces from its rows, one that it moves, one that stays."""

    def __init__(self):
        super().__init__()
        self.body, self.head = make_model(), nn.Linear(1, 1)
        self.stays, self.moves, self.codes = (
            nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(3)
        )

    def forward(self, x):
        y = self.body(x)
        with torch.no_grad():
            self.moves.lerp_(self.head.bias, 0.1)
            self.codes.data = self.codes * 0.9 + y.detach().mean() * 0.1
        return self.head(y + self.codes)


def fitted_codebook():
    model = Codebook()
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        trainer.fit(model, optimizer, loader(), step=step, epochs=2)


class Memory(nn.Module):
    """Has buffers: one that forward moves by its rows, one that counts, one that is of a rank alone."""

    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1), persistent=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        y = self.body(x)
        self.calls += 1
        self.last = y.detach().mean()
        self.mean = self.mean * 0.9 + self.last * 0.1
        return y


def fitted_memory(backend):
    model = Memory()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        held_back = loader()
        trainer.fit(model, optimizer, loader(), step=step, epochs=2, validation=held_back)


def noise_in_a_loop(backend):
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = {"model": model, "optimizer": optimizer}
        with trainer.loop(loader(), epochs=2, state=state) as loop:
            for batch in loop:
                optimizer.zero_grad()
                trainer.backward(trainer.run(step, model, batch))
                for parameter in model.parameters():
                    parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
                optimizer.step()


def all_that_drifts(folder):
    return [
        lines_of(fitted, "ddp", make_callback=InitializesLayer),
        lines_of(fitted, "ddp", folder, make_callback=InitializesLayer),
        lines_of(fitted, "ddp", hooks=True),
        lines_of(noise_in_a_loop, "ddp"),
        lines_of(fitted_codebook),
        lines_of(fitted_memory, "ddp"),
        lines_of(fitted_memory, "fsdp"),
    ]


def test_the_first_parameter_that_ranks_change_by_themselves_is_named_once(two_ranks, tmp_path):
    said = f"the ranks 0 and 1 {WORDS} parameter"
    found, others = two_ranks.run(all_that_drifts, tmp_path / "run")
    assert found == [
        [f"after step 6 {said} '2.weight'"],
        [f"after step 6 {said} '2.weight'"],
        [f"after step 6 {said} '0.weight'"],
        [f"after step 6 {said} '0.weight'"],
        [f"after step 6 {said} 'codes'"],
        [f"after step 6 the ranks 0 and 1 {WORDS} buffer 'mean'"],
        [f"after step 6 the ranks 0 and 1 {WORDS} buffer 'mean'"],
    ]
    assert others == [[]] * len(found)


def own_loop(folder, kind, backend="ddp"):
    """Train in a loop of its own, in which rank 0 alone does something, and evaluate or save after it."""
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model = Memory() if kind == "queue" else make_model()
        rate = 0.2 if kind == "rate" and trainer.is_main else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        model, optimizer, batches = trainer.prepare(model, optimizer, loader())
        if kind == "load" and trainer.is_main:
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        for batch in batches:
            optimizer.zero_grad()
            if kind == "accumulated":  # within it each rank may do as it likes
                with trainer.no_sync(model):
                    for _ in range(1 + 2 * trainer.is_main):
                        trainer.backward(trainer.run(step, model, batch) * 0.0)
            trainer.backward(trainer.run(step, model, batch))
            if kind != "step" or trainer.is_main:
                optimizer.step()
        if kind == "late step" and trainer.is_main:
            optimizer.step()
        if kind == "later rate" and trainer.is_main:
            optimizer.param_groups[0]["lr"] = 0.01
        if kind == "save":
            trainer.save_model(model, folder / "model.pt")
        if kind == "export":
            trainer.export(model, folder / "model.safetensors")
        for _ in range(2):
            trainer.evaluate(model, loader(), step=step)


def all_own_loops(folder):
    kinds = ("load", "step", "late step", "queue", "equal", "accumulated", "save", "export")
    found = {kind: lines_of(own_loop, folder, kind) for kind in kinds}
    for kind in ("rate", "later rate"):
        with pytest.raises(DisagreementError) as caught:
            own_loop(folder, kind)
        found[kind] = str(caught.value)
    found["of shards"] = lines_of(own_loop, folder, "equal", "fsdp")
    with pytest.raises(DisagreementError, match=r"rank 0 has 0\.2"):
        own_loop(folder, "rate", "fsdp")
    return found


def test_ranks_that_part_in_a_loop_of_its_own_are_named_where_all_of_them_meet(two_ranks, tmp_path):
    found, others = two_ranks.run(all_own_loops, tmp_path)
    named = [f"after 2 backward passes the ranks 0 and 1 {WORDS} parameter '0.weight'"]
    assert found.pop("load") == found.pop("step") == named
    assert found.pop("late step") == [f"before evaluate() the ranks 0 and 1 {WORDS} parameter '0.weight'"]
    assert found.pop("queue") == [f"after 2 backward passes the ranks 0 and 1 {WORDS} buffer 'mean'"]
    assert (
        "the setting 'lr' of parameter group 0 of the optimizer 'optimizer': rank 0 has 0.2" in found["rate"]
    )
    assert "rank 0 has 0.01, rank 1 has 0.1; their parameters would part" in found["later rate"]
    for kind in ("equal", "accumulated", "of shards", "save", "export"):
        assert found.pop(kind) == []
    assert {kind: others[kind] for kind in found} == found  # an error is one of all ranks


class Scaled(nn.Module):
    """Its gain is a scalar, of which fsdp leaves each rank the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.linear(x) * self.gain


class DrawsGain(Callback):
    def on_step_end(self, run):
        with torch.no_grad():
            run.model.gain.uniform_(-1, 1)


class DrawsRows(Callback):
    """Draws what ranks hold in parts: none of them has it in common with another."""

    def on_step_end(self, run):
        with torch.no_grad():
            run.model.linear.weight.uniform_(-1, 1)


def fitted_scaled(make_callback):
    model = Scaled()
    with Trainer(seed=0, devices="cpu", backend="fsdp", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, loader(), step=step, epochs=1, callbacks=[make_callback()])


def scaled_lines():
    return [lines_of(fitted_scaled, make) for make in (DrawsGain, DrawsRows)]


def test_of_a_sharded_model_what_each_rank_has_whole_is_compared(two_ranks):
    found, others = two_ranks.run(scaled_lines)
    assert found == [[f"after step 6 the ranks 0 and 1 {WORDS} parameter 'gain'"], []]
    assert others == [[], []]


def all_that_stays():
    return [
        lines_of(fitted, "ddp", make_callback=partial(InitializesLayer, draws_common=True)),
        lines_of(fitted, "ddp", make_callback=AddsNoise, dropout=0.5),
        lines_of(fitted, "fsdp", dropout=0.5),
    ]


def test_programs_whose_ranks_stay_equal_are_told_nothing(two_ranks):
    assert two_ranks.run(all_that_stays) == [[[], [], []]] * 2


class Odd(nn.Module):
    """Has a tensor of a kind that counts no writes, or has no storage."""

    def __init__(self, kind):
        super().__init__()
        self.body = make_model()
        if kind == "sparse":
            self.register_buffer("odd", torch.eye(4).to_sparse())
        elif kind == "nested":
            self.register_buffer("odd", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        elif kind == "frozen":
            self.odd = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
        else:
            with torch.inference_mode():
                odd = torch.ones(4)
            self.register_buffer("odd", odd)

    def forward(self, x):
        return self.body(x)


def fitted_odd(backend, kind):
    model = Odd(kind)
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.body.parameters(), lr=0.01)
        return len(trainer.fit(model, optimizer, loader(), step=step, epochs=1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", ["sparse", "nested", "frozen", "inference"])
def test_tensors_that_count_no_writes_are_let_alone_on_one_device(kind):
    assert fitted_odd("single", kind) == 1


def test_tensors_that_count_no_writes_are_let_alone_on_ranks(two_ranks):
    assert two_ranks.run(fitted_odd, "fsdp", "inference") == [1, 1]


def copies_of_shards(make_callback):
    options = {"fsdp": {"replicas": 2}}
    return lines_of(fitted, "fsdp", make_callback=make_callback, options=options)


@pytest.mark.slow
def test_copies_of_shards_are_compared_with_each_other():
    assert run_ranks(copies_of_shards, 4, None) == [[]] * 4
    (line,), *others = run_ranks(copies_of_shards, 4, InitializesLayer)
    assert WORDS in line
    assert others == [[]] * 3


def rescaled(dtype, change):
    model = make_model().to(dtype)

    class Changes(Callback):
        def on_step_end(self, run):
            with torch.no_grad():
                run.model[0].weight.mul_(1 + run.rank * change)

    def step_in_type(model, batch):
        return step(model, [part.to(dtype) for part in batch])

    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer.fit(model, optimizer, loader(), step=step_in_type, epochs=1, callbacks=[Changes()])


def lines_of_types():
    found = []
    for dtype, change in [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.float32, 0.1)]:
        found.append(lines_of(rescaled, dtype, change))
    return found


def test_differences_of_rounding_are_none(two_ranks):
    found, others = two_ranks.run(lines_of_types)
    assert [len(lines) for lines in found] == [0, 0, 1]
    assert others == [[]] * 3


def resident(name):
    """Return what Linux counts of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def memory_of_sums():
    """Return how many bytes the sums of a weight of 96 MB need."""
    torch.manual_seed(1)
    model = nn.Linear(3000, 8000, bias=False)
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        watch = DriftWatch(trainer.session, {"model": trainer.prepare(model)})
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        (found,) = watch.sums().values()
        needed = resident("VmHWM") - before
    expected = model.weight.detach().double()
    torch.testing.assert_close([found.total, found.norm], [expected.sum().item(), expected.norm().item()])
    return needed


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
def test_sums_of_a_large_weight_need_little_memory(two_ranks):
    assert max(two_ranks.run(memory_of_sums)) < 100e6
