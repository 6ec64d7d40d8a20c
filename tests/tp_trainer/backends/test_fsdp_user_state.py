"""What a user hung on parameters is carried to the shards that take their places, or refused."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StepError, TpError
from tp_core.fully_sharded import whole_matrix_optimizer
from tp_core.state import whole
from tp_trainer import Callback, Trainer

from tests.cases import first_fast


class Block(nn.Module):
    """A unit; its gain is a scalar, which each rank holds whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.linear(x))


class Teacher(nn.Module):
    """A student and a frozen copy of it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(Block(), Block(), nn.Linear(3, 1))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x), self.teacher(x)


def make_model():
    torch.manual_seed(1)
    return Teacher().double()


def loader():
    x = torch.randn(22, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def step(model, batch):
    student, teacher = model(batch[0])
    return (student - batch[1]).square().mean() + 0.1 * (student - teacher).square().mean()


def weights(trainer, model):
    return {name: value.detach().clone() for name, value in trainer.session.model_state(model).items()}


def trained(backend, plant=None, *, callback=None, accumulate=1, make_optimizer=None, step=step):
    """Return the weights after training; ``plant`` gets the model before, ``callback`` makes a callback."""
    model = make_model()
    if plant is not None:
        plant(model)
    make_optimizer = make_optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = make_optimizer(model.student.parameters())
    with Trainer(seed=0, devices="cpu", backend=backend, accumulate=accumulate, progress=False) as trainer:
        callbacks = [] if callback is None else [callback()]
        trainer.fit(model, optimizer, loader(), step=step, epochs=2, callbacks=callbacks)
        return weights(trainer, model)


def error_of(run, *args, **kwargs):
    try:
        run(*args, **kwargs)
    except TpError as error:
        return type(error), str(error)
    return None


# -- Hooks on gradients ---------------------------------------------------------------------------


def mask_rows(model):
    weight = model.student[0].linear.weight
    weight.register_hook(lambda gradient: torch.cat([torch.zeros_like(gradient[:2]), gradient[2:]]))


def clamp_each_gradient(model):
    for parameter in model.student.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def change_accumulated(model):
    for number, parameter in enumerate(model.student.parameters()):
        parameter.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        parameter.number = number

        @torch.no_grad()
        def change(parameter):
            parameter.grad.clamp_(-0.02, 0.02)
            parameter.mul_(1 - 0.01 * parameter.number)

        parameter.register_post_accumulate_grad_hook(change)


def put_on_and_removed(model):
    model.student[2].weight.register_hook(lambda gradient: gradient * 0).remove()


class OnSetup(Callback):
    def on_setup(self, model, optimizer):
        clamp_each_gradient(model)


class OnTheShards(Callback):
    def on_fit_start(self, run):
        for parameter in run.model.student.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


@pytest.mark.parametrize("accumulate", first_fast([1, 2]))
def test_gradient_hooks_see_the_gradient_over_all_ranks(two_ranks, accumulate):
    plants = [mask_rows, clamp_each_gradient, change_accumulated, put_on_and_removed]
    plain = trained("single", accumulate=accumulate)
    callbacks = [{"callback": OnSetup}, {"callback": OnTheShards}]
    for arguments in [*({"plant": plant} for plant in plants), *callbacks]:
        alone = trained("single", accumulate=accumulate, **arguments)
        if arguments.get("plant") is not put_on_and_removed:
            assert not torch.equal(alone["student.0.linear.weight"], plain["student.0.linear.weight"])
        for found in two_ranks.run(partial(trained, "fsdp", accumulate=accumulate, **arguments)):
            torch.testing.assert_close(found, alone, msg=lambda text, of=arguments: f"{of}: {text}")


def step_with_hooks(*, each):
    """Return a step that puts hooks on parameters: once, or anew in each step and off again."""
    handles = []

    def halve(parameter):
        parameter.grad.mul_(0.5)

    def hooked(model, batch):
        if each or not handles:
            while handles:
                handles.pop().remove()
            for parameter in model.student.parameters():
                handles.append(parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02)))
                handles.append(parameter.register_post_accumulate_grad_hook(halve))
        return step(model, batch)

    return hooked


@pytest.mark.parametrize("each", first_fast([True, False]), ids=["in each step", "once"])
def test_gradient_hooks_that_a_step_puts_on_see_the_gradient_over_all_ranks(two_ranks, each):
    alone = trained("single", step=step_with_hooks(each=each))
    for found in two_ranks.run(hooked_in_the_step, each):
        torch.testing.assert_close(found, alone)


def hooked_in_the_step(each):
    return trained("fsdp", step=step_with_hooks(each=each))


class MixedOnAShard(Callback):
    def on_fit_start(self, run):
        run.model.student[2].weight.register_hook(lambda gradient: gradient * torch.ones(1, 3).double())


def backward_past_the_trainer(backend):
    model = make_model()
    clamp_each_gradient(model)
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, batches = trainer.prepare(model, loader())
        for batch in batches:
            trainer.run(step, model, batch).backward()


def a_hook_on_one_rank(backend):
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        if trainer.is_main:
            clamp_each_gradient(model)
        trainer.prepare(model)


def test_hooks_that_cannot_be_carried_are_refused(two_ranks):
    for kind, message in two_ranks.run(partial(error_of, trained, "fsdp", callback=MixedOnAShard)):
        assert kind is StepError
        assert "put on the shard of 'student.2.weight' computes with a plain tensor" in message
    for kind, message in two_ranks.run(partial(error_of, backward_past_the_trainer, "fsdp")):
        assert kind is StepError
        assert "has a gradient hook, and is fully sharded: call trainer.backward(loss)" in message


def test_a_hook_of_one_rank_alone_is_refused(two_ranks):
    for _, message in two_ranks.run(partial(error_of, a_hook_on_one_rank, "fsdp")):
        assert "ranks disagree on parameters with gradient hooks" in message


# -- Attributes -----------------------------------------------------------------------------------


def attributes_seen(backend):
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.written = name
    seen = []

    def step_that_looks(model, batch):
        seen.append({n: (p.written, getattr(p, "later", None)) for n, p in model.named_parameters()})
        return step(model, batch)

    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([p.written for group in self.param_groups for p in group["params"]])
            return super().step(closure)

    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model = trainer.prepare(model)
        for name, parameter in trainer.session.unwrap(model).named_parameters():
            assert parameter.written == name
            parameter.later = 1
        optimizer = trainer.prepare(Looks(model.student.parameters(), lr=0.1))
        for _, batch in zip(range(2), trainer.prepare(loader()), strict=False):
            trainer.backward(trainer.run(step_that_looks, model, batch))
            optimizer.step()
    return seen


def test_attributes_of_parameters_are_there_on_shards_in_steps_and_in_optimizers(two_ranks):
    assert two_ranks.run(partial(attributes_seen, "fsdp")) == [attributes_seen("single")] * 2


# -- Assignments to `.data` -----------------------------------------------------------------------


class AssignsTrained(Callback):
    def on_step_end(self, run):
        weight = run.model.student[2].weight
        weight.data = weight.data * 0.5


class AssignsFrozen(Callback):
    def on_step_end(self, run):
        pairs = zip(run.model.teacher.parameters(), run.model.student.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data = teacher.data * 0.9 + student.data * 0.1


class AssignsAtTheEnd(Callback):
    def on_fit_end(self, run):
        AssignsTrained.on_step_end(self, run)


class AssignsInABlock(Callback):
    def on_optimizer_step(self, run, norm):
        weight = run.model.student[1].linear.weight
        weight.data = weight.data * 0.5


class AssigningSgd(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad


def with_a_hook_that_assigns(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def assign(optimizer, args, kwargs):
        last = optimizer.param_groups[0]["params"][-1]
        last.data = last.data.clamp(-0.1, 0.1)

    optimizer.register_step_post_hook(assign)
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "name"),
    first_fast(
        [
            ({"callback": AssignsTrained}, "student.2.weight"),
            ({"callback": AssignsFrozen}, "teacher.0.linear.weight"),
            ({"callback": AssignsAtTheEnd}, "student.2.weight"),
            ({"callback": AssignsInABlock}, "student.1.linear.weight"),
            ({"make_optimizer": AssigningSgd}, "student.0.linear.weight"),
            ({"make_optimizer": with_a_hook_that_assigns}, "student.2.bias"),
        ],
        2,
    ),
)
def test_data_that_is_replaced_between_steps_is_refused(two_ranks, arguments, name):
    for found in two_ranks.run(partial(error_of, trained, "fsdp", **arguments)):
        assert found is not None
        assert found[0] is StepError
        assert f"the data of the parameter {name!r} was replaced" in found[1]


class ThroughAVector(Callback):
    def on_step_end(self, run):
        parameters = list(run.model.student.parameters())
        vector = nn.utils.parameters_to_vector(parameters)
        nn.utils.vector_to_parameters(vector * 0.9, parameters)


class FromAPlainVector(Callback):
    def on_step_end(self, run):
        parameters = list(run.model.student.parameters())
        nn.utils.vector_to_parameters(torch.zeros(99, dtype=torch.float64), parameters)


class SetsData(Callback):
    def on_step_end(self, run):
        for parameter in run.model.student.parameters():
            parameter.data.set_(parameter.data * 0.9)


class ClipsByUnit(Callback):
    """Clips the gradient of each unit by the norm of its weights, as timm's adaptive clipping does."""

    def on_optimizer_step(self, run, grad_norm):
        for parameter in run.model.student.parameters():
            if parameter.dim() > 1:
                most = parameter.norm(dim=1, keepdim=True).clamp_(min=1e-3)
                parameter.grad.mul_((0.01 * most / parameter.grad.norm(dim=1, keepdim=True)).clamp(max=1))
            else:
                most = parameter.norm().clamp_(min=1e-3)
                parameter.grad.mul_((0.01 * most / parameter.grad.norm()).clamp(max=1))


def set_in_a_loop(backend):
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model = trainer.prepare(make_model())
        with trainer.loop(loader(), state={"model": model}) as loop:
            for batch in loop:
                trainer.backward(trainer.run(step, model, batch))
                SetsData().on_step_end(loop)


def test_other_writes_of_data_are_refused_with_a_remedy(two_ranks):
    words = "Write one parameter at a time, in place"
    cases = [
        (partial(trained, "fsdp", callback=ThroughAVector), words),
        (partial(trained, "fsdp", callback=FromAPlainVector), "'student.0.linear.weight' was replaced"),
        (partial(trained, "fsdp", callback=SetsData), words),
        (partial(set_in_a_loop, "fsdp"), words),
        (partial(trained, "fsdp", callback=ClipsByUnit), words),
    ]
    for run, message in cases:
        for found in two_ranks.run(partial(error_of, run)):
            assert found is not None
            assert found[0] is StepError
            assert message in found[1]


def assigned_and_closed(backend, *, looks=False):
    model = make_model()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model = trainer.prepare(model)
        model.student[2].weight.data = model.student[2].weight.data * 2
        if looks:
            weights(trainer, model)
            pytest.fail("the state was returned")


def test_data_that_is_replaced_after_the_last_step_is_refused_at_the_end_and_in_states(two_ranks):
    for looks in (False, True):
        for found in two_ranks.run(partial(error_of, assigned_and_closed, "fsdp", looks=looks)):
            assert found is not None
            assert "'student.2.weight' was replaced" in found[1]


class WritesInPlace(Callback):
    def on_step_end(self, run):
        pairs = zip(run.model.teacher.parameters(), run.model.student.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
            kept = student.data.clone()
            student.data.copy_(teacher.data)
            student.data.copy_(kept)
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state)
        run.model.to("cpu").double()


def assign_before(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def test_data_that_is_written_in_place_or_replaced_before_training_is_taken(two_ranks):
    for arguments in ({"callback": WritesInPlace}, {"plant": assign_before}):
        alone = trained("single", **arguments)
        for found in two_ranks.run(partial(trained, "fsdp", **arguments)):
            torch.testing.assert_close(found, alone)


# -- Writes into parts of sharded tensors ---------------------------------------------------------


def assign_rows(weight, old):
    weight[:2] = old[:2] * 0.5
    weight[2] = 0.25
    weight[0, 1] = torch.tensor(0.125)


def assign_by_index(weight, old):
    weight[torch.tensor([2, 0])] = old[:2]
    weight[weight > 0.4] = 0.4
    weight[..., 1:][1] += 0.1


def write_rows(weight, old):
    weight[:2].mul_(0.9).add_(old[:2], alpha=0.1)
    weight[1][2].zero_()
    weight[0].copy_(weight[1])
    weight[2] *= 0.5
    torch.add(weight[1], 0.1, out=weight[2])


def write_data(weight, old):
    weight.data[1:] = old[1:]
    weight.data[0].data.mul_(0.9)
    weight.detach()[2].detach().add_(0.1)


def write_other_views(weight, old):
    weight.select(0, 1).add_(0.01)
    weight.narrow(0, 1, 2).add_(0.01)
    weight.diagonal().add_(0.01)
    first, *_ = weight.split(2)
    first.t()[1].clamp_(-0.1, 0.1)
    weight.vsplit(3)[0].fill_(0.3)
    weight.split_with_sizes([1, 2])[1].add_(0.01)
    weight.chunk(3)[2].sub_(0.1)
    weight[:, 1:].mul_(0.9)  # torch gathers nothing for it


def initialize_rows(weight, old):
    torch.nn.init.constant_(weight[:1], 0.1)
    torch.nn.init.uniform_(weight[1:], generator=torch.Generator().manual_seed(3))
    torch.nn.init.xavier_uniform_(weight[:2], generator=torch.Generator().manual_seed(4))


class WritesParts(Callback):
    """Writes into parts of a trained and of a frozen weight."""

    def __init__(self, write):
        self.write = write
        self.old = None

    @torch.no_grad()
    def on_step_end(self, run):
        weights = [run.model.student[1].linear.weight, run.model.teacher[0].linear.weight]
        if self.old is None:
            self.old = [weight.detach().clone() for weight in weights]
        for weight, old in zip(weights, self.old, strict=True):
            self.write(weight, old)


class WritesPartsOfGradients(Callback):
    def on_optimizer_step(self, run, grad_norm):
        weight = run.model.student[0].linear.weight
        weight.grad[:2] = 0
        weight.grad[2].mul_(0.5)
        for momentum in (state["momentum_buffer"] for state in run.optimizer.state.values()):
            if momentum.dim() == 2:
                momentum[:1].zero_()


PART_WRITES = [
    assign_rows,
    assign_by_index,
    write_rows,
    write_data,
    write_other_views,
    initialize_rows,
]


@pytest.mark.parametrize(
    "callback",
    first_fast([*(partial(WritesParts, write) for write in PART_WRITES), WritesPartsOfGradients]),
    ids=[*(write.__name__ for write in PART_WRITES), "of_gradients"],
)
def test_what_is_written_into_parts_of_sharded_tensors_counts(two_ranks, callback):
    plain, alone = trained("single"), trained("single", callback=callback)
    assert any(not torch.equal(plain[name], alone[name]) for name in plain)
    for found in two_ranks.run(partial(trained, "fsdp", callback=callback)):
        torch.testing.assert_close(found, alone)


class WritesWithGradients(Callback):
    """Writes a part of a leaf that wants its gradient, as torch allows on no device."""

    def __init__(self, write):
        self.write = write

    def on_step_end(self, run):
        self.write(run.model.student[1].linear.weight)


class WritesSeveral(Callback):
    @torch.no_grad()
    def on_step_end(self, run):
        weight = run.model.teacher[0].linear.weight
        torch._foreach_mul_([weight[0], weight[2]], 0.5)


def torchs_error(backend, write):
    with pytest.raises(RuntimeError) as caught:
        trained(backend, callback=partial(WritesWithGradients, write))
    return str(caught.value)


def set_row(weight):
    weight[0] = 0.0


def zero_row(weight):
    weight[0].zero_()


def test_writes_into_parts_that_cannot_be_carried_are_refused(two_ranks):
    for found in two_ranks.run(partial(error_of, trained, "fsdp", callback=WritesSeveral)):
        assert found is not None
        assert found[0] is StepError
        assert "_foreach_mul_ writes several tensors at once, and one of them is a part" in found[1]
    for write in (set_row, zero_row):
        alone = torchs_error("single", write)
        for found in two_ranks.run(partial(torchs_error, "fsdp", write)):
            assert "a view of a leaf Variable that requires grad" in alone
            assert "a view of a leaf Variable that requires grad" in found


def writes_by_functions():
    """Return what is said of writes into parts that functions of torch have made, and the weight's change."""

    def assign(weight):
        torch.narrow(weight.data, 0, 0, 2)[0] = 1.0

    def augment(weight):
        part = torch.diagonal(weight)
        part += 1

    writes = [lambda weight: torch.select(weight, 0, 1).zero_(), assign, augment]
    messages = []
    with Trainer(seed=0, devices="cpu", backend="fsdp", progress=False) as trainer:
        model = trainer.prepare(make_model())
        weight = trainer.session.unwrap(model).student[1].linear.weight
        before = whole(weight.detach()).clone()
        with torch.no_grad():
            for write in writes:
                with pytest.raises(StepError) as caught:
                    write(weight)
                messages.append(str(caught.value))
        return messages, torch.equal(whole(weight.detach()), before)


def test_writes_into_parts_by_functions_of_torch_are_refused(two_ranks):
    for messages, is_unchanged in two_ranks.run(writes_by_functions):
        assert [message.split(" writes a part")[0] for message in messages] == [
            "zero_",
            "an assignment",
            "__iadd__",
        ]
        assert is_unchanged


def test_parts_are_read_as_before(two_ranks):
    assert two_ranks.run(partial(parts_read, "fsdp")) == [parts_read("single")] * 2


def parts_read(backend):
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model = trainer.prepare(make_model())
        weight = trainer.session.unwrap(model).student[1].linear.weight
        with torch.no_grad():
            rows = [weight[0], weight[1:], weight[1][1:], torch.stack([weight[0], weight[2]]), weight[0] + 1]
            found = [whole(value).tolist() for value in (*rows, weight[:2] @ weight.t(), weight[0].norm())]
            return found, len(weight[0]), tuple(weight[:2].shape), copy.copy(weight[0]).sum().item()


# -- The parameters that shards have replaced -----------------------------------------------------


def a_penalty_over_a_list_from_before(backend):
    model = make_model()
    parameters = list(model.student.parameters())

    def penalized(model, batch):
        return step(model, batch) + 0.01 * sum(p.square().sum() for p in parameters)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        trainer.fit(model, optimizer, loader(), step=penalized, epochs=1)


class ClampsAList(Callback):
    def on_setup(self, model, optimizer):
        self.parameters = list(model.parameters())

    def on_step_end(self, run):
        for parameter in self.parameters:
            parameter.data.clamp_(-0.1, 0.1)


def test_parameters_from_before_are_refused_wherever_they_are_used(two_ranks):
    clamps = partial(trained, "fsdp", callback=ClampsAList)
    for run in (partial(a_penalty_over_a_list_from_before, "fsdp"), clamps):
        for found in two_ranks.run(partial(error_of, run)):
            assert found is not None
            assert found[0] is StepError
            assert "this parameter was 'student.0.linear.weight' of a model until" in found[1]


def gradients_from_before(backend):
    model = make_model()
    student, _ = model(torch.ones(2, 3, dtype=torch.float64))
    student.sum().backward()
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, optimizer = trainer.prepare(model, torch.optim.SGD(model.student.parameters(), lr=0.1))
        optimizer.step()
        return weights(trainer, model)


def test_gradients_from_before_are_carried(two_ranks):
    alone = gradients_from_before("single")
    for found in two_ranks.run(partial(gradients_from_before, "fsdp")):
        torch.testing.assert_close(found, alone)


# -- Counters of optimizers that step whole matrices ----------------------------------------------


class Lamb(torch.optim.Optimizer):
    """LAMB that counts its steps in one of several places; ``clips`` by the norm of all gradients."""

    def __init__(self, params, *, where, clips=None):
        super().__init__(params, {"lr": 0.05, "clips": clips})
        if where == "tensor before":
            for group in self.param_groups:
                group["count"] = torch.zeros(())
        if where == "nested":
            self.param_groups[0]["counts"] = {"of": [0]}
        self.where = where
        self.count = 0

    def _count(self, group):
        if self.where == "number":
            group["count"] = group.get("count", 0) + 1
            return group["count"]
        if self.where == "tensor":
            group.setdefault("count", torch.zeros(()))
        if self.where.startswith("tensor"):
            group["count"] += 1
            return group["count"].item()
        if self.where == "nested":
            group["counts"]["of"][0] += 1
            return group["counts"]["of"][0]
        if self.where == "attribute":
            self.count += 1
            return self.count
        if self.where == "made":
            self.made = getattr(self, "made", torch.zeros(())) + 1
            return self.made.item()
        common = self.state["common"]
        common["count"] = common.get("count", 0) + 1
        return common["count"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            count = self._count(group)
            with_gradients = [p for p in group["params"] if p.grad is not None]
            scale = 1.0
            if group["clips"] and with_gradients:
                norm = torch.stack([p.grad.norm() for p in with_gradients]).norm()
                scale = min(1.0, group["clips"] / float(norm))
            for p in with_gradients:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1 * scale)
                state["v"].mul_(0.999).addcmul_(p.grad * scale, p.grad * scale, value=0.001)
                update = state["m"] / (1 - 0.9**count) / ((state["v"] / (1 - 0.999**count)).sqrt() + 1e-6)
                ratio = float((p.norm() + 1e-3) / (update.norm() + 1e-3))
                p.add_(update, alpha=-group["lr"] * ratio)


# -- Optimizers that are known by what they do ----------------------------------------------------


class Normed(torch.optim.Optimizer):
    """Divides by a norm of each gradient, from a step on: of all of it, or of each of its rows."""

    def __init__(self, params, *, rows=False, begins=1, rate=0.05):
        super().__init__(params, {"lr": rate})
        self.rows, self.begins = rows, begins

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                norm = 1.0
                if state["count"] >= self.begins:
                    norm = p.grad.norm(dim=1, keepdim=True) if self.rows and p.dim() == 2 else p.grad.norm()
                p.add_(p.grad / (norm + 1e-3), alpha=-float(group["lr"]))


class Totals(torch.optim.SGD):
    """Divides all gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad.div_(total)
        super().step(closure)


class Ordinary(torch.optim.Optimizer):
    """Treats each element by itself, with state, and counts in a list."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
        self.steps = [0]

    @torch.no_grad()
    def step(self, closure=None):
        self.steps[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = state.get("m", torch.zeros_like(p)).lerp(p.grad, 0.1)
                    p.sub_(state["m"].sign(), alpha=group["lr"] / self.steps[0])


NORMED = [Normed, partial(Normed, rows=True), partial(Normed, begins=3)]


@pytest.mark.slow
def test_optimizers_of_unknown_names_that_need_whole_matrices_get_them(two_ranks):
    for make in [*NORMED, Ordinary]:
        alone = trained("single", make_optimizer=make)
        for found in two_ranks.run(partial(trained, "fsdp", make_optimizer=make)):
            torch.testing.assert_close(found, alone, msg=lambda text, of=make: f"{of}: {text}")


def test_an_optimizer_of_unknown_name_with_a_norm_over_all_matrices_is_refused(two_ranks):
    for kind, message in two_ranks.run(
        partial(error_of, trained, "fsdp", make_optimizer=partial(Totals, lr=0.1))
    ):
        assert kind is ConfigError
        assert "Totals computes with several parameters at once" in message


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Normed, "Normed"),
        (partial(Normed, rows=True), "Normed"),
        (partial(Normed, rate=0.0), "Normed"),  # at the beginning of a warm-up
        (partial(Normed, rate=torch.zeros(())), "Normed"),
        (partial(Normed, rate=1e-9), "Normed"),
        (partial(Totals, lr=0.1), "Totals"),
        (Ordinary, None),
        (partial(torch.optim.AdamW, lr=0.1), None),
        (partial(torch.optim.Muon, lr=0.1), "Muon"),
    ],
)
def test_what_needs_whole_matrices_is_found_by_trial_steps_that_leave_no_trace(make, name):
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = make([weight])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    generator = torch.get_rng_state()
    before = copy.deepcopy(optimizer.state_dict())
    assert whole_matrix_optimizer(optimizer) == name
    assert optimizer.state_dict() == before
    assert getattr(optimizer, "steps", [0]) == [0]
    assert torch.equal(torch.get_rng_state(), generator)
    assert not calls
    assert torch.equal(weight, torch.ones(3, 4))


PLACES = ["number", "tensor", "tensor before", "nested", "attribute", "made", "common state"]


def counted(backend, where):
    model = make_model()
    optimizer = Lamb(model.student.parameters(), where=where)
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        trainer.fit(model, optimizer, loader(), step=step, epochs=1)
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        common = [optimizer.count, getattr(optimizer, "made", None), optimizer.state.get("common")]
        return weights(trainer, model), str((group, common))


def all_counted(backend):
    return {where: counted(backend, where) for where in PLACES}


@pytest.mark.slow
def test_the_steps_of_matrices_count_as_one(two_ranks):
    alone = all_counted("single")
    for found in two_ranks.run(partial(all_counted, "fsdp")):
        for where in PLACES:
            torch.testing.assert_close(found[where][0], alone[where][0], msg=lambda t, w=where: f"{w}: {t}")
            assert found[where][1] == alone[where][1]


def counted_while_frozen(backend):
    model = make_model()
    optimizer = Lamb(model.student.parameters(), where="number")
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, optimizer, batches = trainer.prepare(model, optimizer, loader())
        for number, batch in enumerate(batches):
            trainer.backward(trainer.run(step, model, batch))
            if number < 2:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return weights(trainer, model), optimizer.param_groups[0]["count"]


def test_a_step_without_gradients_counts_as_on_one_device(two_ranks):
    alone = counted_while_frozen("single")
    for found in two_ranks.run(partial(counted_while_frozen, "fsdp")):
        assert found[1] == alone[1]
        torch.testing.assert_close(found[0], alone[0])


class SettingLamb(Lamb):
    def __init__(self, params):
        super().__init__(params, where="number")
        for group in self.param_groups:
            group["max_grad_norm"] = 1.0


def test_a_norm_over_all_matrices_is_refused(two_ranks):
    for make in (SettingLamb, partial(Lamb, where="number", clips=0.01)):
        for found in two_ranks.run(partial(error_of, trained, "fsdp", make_optimizer=make)):
            assert found is not None
            assert found[0] is ConfigError
            assert "Lamb computes with several parameters at once" in found[1]


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise AssertionError


def test_an_optimizer_that_fails_over_shards_says_so(two_ranks):
    for found in two_ranks.run(partial(error_of, trained, "fsdp", make_optimizer=partial(Fails, lr=0.1))):
        assert found is not None
        assert found[0] is StepError
        assert "the step of Fails failed over parameters that are DTensors" in found[1]
        assert "AssertionError" in found[1]


# -- Types ----------------------------------------------------------------------------------------


class Island(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.log_scale = nn.Parameter(torch.tensor([4.6052]))
        self.uses_head = head

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            if self.uses_head:
                return self.head(x.float())
            return x.float() * self.log_scale.exp()


def in_bfloat16(backend, *, head, accumulate=1, options=None):
    torch.manual_seed(1)
    model = Island(head)
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))
    seen = []

    def step(model, batch):
        output = model(batch[0])
        seen.append((model.log_scale.dtype, model.log_scale.item()))
        # The head, with the last batch of the window only.
        late = 0.0 if len(seen) % accumulate else model.head(batch[0]).mean()
        return output.square().mean() / 1e4 + late

    settings = {"seed": 0, "devices": "cpu", "progress": False, "precision": "bf16-mixed"}
    with Trainer(backend=backend, accumulate=accumulate, options=options, **settings) as trainer:
        batches = DataLoader(TensorDataset(x), batch_size=4)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches, step=step, epochs=1)
        return weights(trainer, model), seen


def test_parameters_of_one_dimension_keep_their_type(two_ranks):
    alone, seen = in_bfloat16("single", head=False)
    for found, theirs in two_ranks.run(partial(in_bfloat16, "fsdp", head=False)):
        assert {dtype for dtype, _ in theirs} == {torch.float32}
        assert theirs[0][1] == seen[0][1]
        torch.testing.assert_close(found, alone, rtol=1e-2, atol=1e-4)


def test_a_part_in_float32_is_refused_with_the_option_for_it(two_ranks):
    for found in two_ranks.run(partial(error_of, in_bfloat16, "fsdp", head=True)):
        assert found is not None
        assert found[0] is StepError
        assert "than its parameters are gathered in, torch.bfloat16" in found[1]
        assert "param_dtype=torch.float32" in found[1]
    options = {"fsdp": {"param_dtype": torch.float32}}
    alone, _ = in_bfloat16("single", head=True)
    for found, _ in two_ranks.run(partial(in_bfloat16, "fsdp", head=True, options=options)):
        torch.testing.assert_close(found, alone, rtol=1e-2, atol=1e-4)


def test_a_parameter_first_used_in_the_last_accumulated_batch_has_its_gradient(two_ranks):
    alone, _ = in_bfloat16("single", head=False, accumulate=2)
    for found, _ in two_ranks.run(partial(in_bfloat16, "fsdp", head=False, accumulate=2)):
        torch.testing.assert_close(found, alone, rtol=1e-2, atol=1e-4)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))

    def forward(self, x):
        return (x @ self.weight).abs()


def complex_clipped(backend):
    torch.manual_seed(0)
    model = Complex()
    x = torch.randn(8, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = DataLoader(TensorDataset(x), batch_size=4)
        trainer.fit(model, optimizer, batches, step=lambda m, b: m(b[0]).mean(), epochs=2, clip_norm=0.1)
        return weights(trainer, model)


def test_complex_gradients_are_clipped(two_ranks):
    alone = complex_clipped("single")
    for found in two_ranks.run(partial(complex_clipped, "fsdp")):
        torch.testing.assert_close(found, alone)


# -- A gradient penalty ---------------------------------------------------------------------------


def penalized(backend):
    def with_penalty(model, batch):
        x = batch[0].clone().requires_grad_()
        output = model.student(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (output - batch[1]).square().mean() + gradient.square().mean()

    trained(backend, step=with_penalty)


def test_the_message_for_a_gradient_penalty_names_it(two_ranks):
    for found in two_ranks.run(partial(error_of, penalized, "fsdp")):
        assert found is not None
        assert found[0] is StepError
        assert "the step made a backward pass of its own (torch.autograd.grad" in found[1]
