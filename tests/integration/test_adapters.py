"""Models of transformers with adapters of peft: on every backend they are trained alone, and as by hand."""

import itertools
import os
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
import tp_shard as ts
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core.errors import ConfigError, ModelError, TpError
from tp_core.replicas import Replicas
from tp_shard import ShardOptions
from tp_trainer import Callback, Checkpoints, Trainer

from tests import adapters

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft's own question
]


@pytest.fixture(scope="module")
def places():
    with adapters.Places() as found:
        yield found


# -- The table of families, kinds of adapters and backends ----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "begun", "finished"),
    [
        ("bert", "saved", "dp-gather", "tuple"),
        ("llama", "lora", "tuple", "single"),
        ("gpt2", "ia3", "single", "dp-gather"),
    ],
)
def test_adapters_are_trained_as_by_hand_and_resumed(places, family, kind, begun, finished):
    assert places.check(family, kind, begun, finished) == "right"


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=pytest.mark.slow if family == "gpt2" else pytest.mark.nightly)
        for family, kind in zip(adapters.TABLE, itertools.cycle(adapters.KINDS))
    ],
)
def test_a_run_that_goes_through_all_backends_is_right(places, family, kind):
    assert places.check_all(family, kind) == "right"


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "kind"), [*itertools.product(adapters.TABLE, adapters.KINDS)])
def test_adapters_of_a_kind_are_right_on_every_backend(places, family, kind):
    found = {case[2]: places.check(*case) for case in adapters.cases() if case[:2] == (family, kind)}
    assert found == dict.fromkeys(adapters.PLACES, "right")


# -- Frozen parameters: no gradients, no state, no communication -----------------------------------


class Traffic(TorchDispatchMode):
    """Adds up the bytes of collectives by their names: flat ones, which are of gradients and weights.

    Those of rows are of activations, and those of a number are means.
    """

    def __init__(self):
        super().__init__()
        self.nbytes = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            given = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            tensors = [t for t in given if isinstance(t, torch.Tensor) and t.dim() == 1 and t.numel() > 1]
            name = operator._schema.name.removeprefix("c10d::")
            self.nbytes[name] += max((t.nbytes for t in tensors), default=0)
        return operator(*args, **(kwargs or {}))


def one_step(backend, options=None, plan=None):
    """Return what the third step communicates, of trained and of all parameters, and what was left behind."""
    torch.set_num_threads(1)
    if plan is not None:
        ts.distributed.init_process_group(2)
    model = adapters.make("llama", "lora")
    if plan is not None:
        model = ts.parallelize(model, plan)
    with Trainer(backend=backend, devices="cpu", seed=0, progress=False, options=options) as trainer:
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        whole = sum(p.nbytes for p in model.parameters())
        prepared, optimizer = trainer.prepare(model, adapters.make_optimizer(model))
        batch = next(iter(adapters.loader("llama")))
        for _ in range(3):
            optimizer.zero_grad()
            with Traffic() as traffic:
                trainer.backward(trainer.run(adapters.step, prepared, batch))
            optimizer.step()
        plain = trainer.session.unwrap(prepared)
        frozen = [p for p in plain.parameters() if not p.requires_grad]
        assert all(p.grad is None and p not in optimizer.state for p in frozen)
        assert len(optimizer.state) == sum(1 for p in plain.parameters() if p.requires_grad)
    ts.distributed.destroy_process_group()
    return dict(traffic.nbytes), trained, whole


@pytest.mark.slow
def test_frozen_parameters_are_not_reduced_between_ranks(places):
    for found, trained, _ in places.run(2, one_step, "ddp"):
        assert found["allreduce_"] == trained
    for found, trained, whole in places.run(2, one_step, "fsdp"):
        assert found["_reduce_scatter_base_"] == trained
        assert found.get("allreduce_", 0) == 0
        assert found["_allgather_base_"] <= 2 * whole  # in forward, and where units were let go in backward
    plan = adapters.plan_of("llama", "lora")
    for found, trained, _ in places.run(4, one_step, "shard", ShardOptions(group_size=2, data="ddp"), plan):
        assert found["allreduce_"] == trained
    for found, trained, _ in places.run(4, one_step, "shard", ShardOptions(group_size=2, data="fsdp"), plan):
        assert found["_reduce_scatter_base_"] == trained
        assert found.get("allreduce_", 0) == 0


# -- Shards of adapters that were lost by others ---------------------------------------------------
# Accelerate saved rank 0's part of each adapter, and gave other ranks nothing back, under fully_shard: each
# rank fills its own part with numbers of its own, so that a part from elsewhere is seen.


class Fill(Callback):
    """Fills this rank's parts of adapters, or only looks at them."""

    def __init__(self, values=None):
        self.values, self.seen = values, {}

    def on_fit_start(self, run):
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad:
                part = parameter.detach().to_local()
                if self.values is not None:
                    part.fill_(self.values["lora_A" if "lora_A" in name else "lora_B"])
                self.seen[name] = part.unique().tolist()


def saves_parts(folder, resumes):
    import peft

    rank = int(os.environ["RANK"])
    values = {"lora_A": 0.03 + 0.01 * rank, "lora_B": 0.01 + 0.01 * rank}
    base = adapters.plain("qwen2").double()
    model = peft.get_peft_model(base, adapters.configuration("qwen2", "lora", r=32))
    if resumes:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.zero_()
    fill = Fill(None if resumes else values)
    with Trainer(backend="fsdp", devices="cpu", seed=0, progress=False) as trainer:
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            adapters.loader("qwen2"),
            step=adapters.step,
            epochs=2,
            max_steps=None if resumes else 3,
            checkpoint=Checkpoints(folder),
            resume="auto",
            callbacks=[fill],
        )
        if not resumes:
            trainer.save_model(model, folder / "model.pt")
        else:
            trainer.load_model(model, folder / "model.pt")
    return fill.seen, values


@pytest.mark.slow
def test_every_rank_gets_its_part_of_each_adapter_back(places, tmp_path):
    places.run(2, saves_parts, tmp_path, False)
    for seen, values in places.run(2, saves_parts, tmp_path, True):
        assert seen
        for name, found in seen.items():
            assert found == [values["lora_A" if "lora_A" in name else "lora_B"]], name
    state = torch.load(tmp_path / "model.pt")
    halves = {name: tensor.chunk(2) for name, tensor in state.items() if "lora_B" in name}
    assert halves
    assert all((a == 0.01).all() and (b == 0.02).all() for a, b in halves.values())


# -- Samples in the middle of a run: peft's generate() calls the model inside it --------------------


class Samples(Callback):
    def __init__(self):
        self.made = []

    def on_epoch_end(self, run):
        ids = torch.tensor([[5, 6, 7]])
        self.made += run.model.generate(
            input_ids=ids, attention_mask=ids.sign(), max_new_tokens=3, do_sample=False
        ).tolist()


def generates(backend):
    torch.set_num_threads(1)
    model, samples = adapters.make("llama", "lora"), Samples()
    with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
        options = {"step": adapters.step, "epochs": 2, "callbacks": [samples]}
        trainer.fit(model, adapters.make_optimizer(model), adapters.loader("llama"), **options)
        assert (backend == "fsdp") == any(hasattr(p, "device_mesh") for p in model.parameters())
        loss = trainer.evaluate(model, adapters.loader("llama"), step=adapters.step)["loss"]
    return samples.made, loss


@pytest.mark.slow
def test_a_callback_generates_on_shards_as_on_one_device(places):
    made, loss = generates("single")
    for found in places.run(2, generates, "fsdp"):
        assert found == (made, pytest.approx(loss, rel=1e-9))


# -- Steps that disable adapters -------------------------------------------------------------------


@pytest.mark.slow
def test_disabling_adapters_in_one_replica_leaves_the_others_trainable():
    model = adapters.make("llama", "lora")

    def step(replica, number):
        if number == 1:
            replica.disable_adapter().__enter__()
        return [p.requires_grad for p in model.parameters()]

    trained = [p.requires_grad for p in model.parameters()]
    assert any(trained)
    assert Replicas(model, ["cpu", "cpu"]).run(step, [0, 1]) == [trained, trained]
    assert [p.requires_grad for p in model.parameters()] == trained


def distilled(model, batch):
    """Add how far the logits are from the base's, a mean over the same tokens, to the loss of a step."""
    found = adapters.step(model, batch)
    with torch.no_grad(), model.disable_adapter():
        base = model(**batch).logits
    away = (model(**batch).logits - base).square().mean(-1)[batch["labels"] != adapters.NO_LABEL]
    return {**found, "loss": found["loss"] + away.mean()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_a_step_that_disables_adapters_trains_as_on_one_device(backend):
    def train(name, devices):
        model = adapters.make("llama", "lora").double()
        with Trainer(backend=name, devices=devices, seed=0, progress=False) as trainer:
            optimizer = adapters.make_optimizer(model)
            trainer.fit(model, optimizer, adapters.loader("llama"), step=distilled, epochs=2)
        return {name: p.detach() for name, p in model.named_parameters()}

    torch.testing.assert_close(train(backend, ["cpu", "cpu"]), train("single", "cpu"), rtol=1e-9, atol=1e-12)


# -- What is refused -------------------------------------------------------------------------------


def fit(model, optimizer=None, **arguments):
    with Trainer(devices="cpu", progress=False, **arguments) as trainer:
        trainer.fit(
            model, optimizer or adapters.make_optimizer(model), adapters.loader("gpt2"), step=adapters.step
        )


def test_an_optimizer_of_frozen_parameters_alone_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2))
    frozen = torch.optim.SGD(model[0].parameters(), lr=0.1)
    said = "the optimizer's 2 parameters are all frozen, so training would change nothing"
    with pytest.raises(ConfigError, match=said):
        fit(model, frozen)
    with pytest.raises(ConfigError, match=said):
        Trainer(devices="cpu").prepare(model, frozen)


def tied(**options):
    return adapters.adapted("gpt2", "lora", modules_to_save=["lm_head"], **options)


@pytest.mark.slow
def test_a_copy_of_a_module_that_shares_its_weight_is_refused():
    said = r"'base_model.model.lm_head' is in modules_to_save, and shares 'weight' with .*wte"
    with pytest.raises(ModelError, match=said):
        fit(tied())
    with pytest.raises(ModelError, match="ensure_weight_tying=True"):
        Trainer(devices="cpu").prepare(model := tied(), adapters.make_optimizer(model))
    fit(tied(ensure_weight_tying=True).double())


@pytest.mark.slow
def test_a_plan_for_an_adapter_that_cannot_be_cut_is_refused():
    model = adapters.adapted("vit", "lora", target_modules=["projection", "fc1", "fc2"])
    path = next(name for name, _ in model.named_modules() if name.endswith("projection"))
    plan = {path: ts.Column(), "**.fc1": ts.Column(), "**.fc2": ts.Row()}
    with pytest.raises(ModelError, match=f"{path}.*Conv2d"):
        ts.parallelize(model, plan)


# -- Bad input, on two ranks: each gets the same sentence, before the first step -------------------


class Params4bit(torch.nn.Parameter):
    """A weight as bitsandbytes has it, which is known by its module."""

    __module__ = "bitsandbytes.nn.modules"


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.up.weight = Params4bit(self.up.weight.detach(), requires_grad=False)


def says(function, *args, **kwargs):
    """Return the error that a call raises, as a text."""
    try:
        function(*args, **kwargs)
    except TpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals(folder, backend, plan):
    """Return what a rank is told of each bad input."""
    torch.set_num_threads(1)
    found, steps = {}, []

    def step(model, batch):
        steps.append(1)
        return adapters.step(model, batch)

    def try_fit(model, *, frozen=False, **options):
        if backend == "shard" and plan is not None:
            model = ts.parallelize(model, plan)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad != frozen], lr=0.1)
        with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
            trainer.fit(model, optimizer, adapters.loader("llama"), step=step, **options)

    def try_load(name):
        model = adapters.make("llama", "lora")
        if backend == "shard":
            model = ts.parallelize(model, plan)
        with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
            trainer.load_model(model, folder / name)

    def make(**base):
        return adapters.adapted("llama", "lora", base=adapters.plain("llama", **base)).double()

    def other_base():
        model = make()
        model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight.data[3, 5] += 1e-9
        return model

    trained = Checkpoints(folder / "run", weights="trainable")
    copied = adapters.adapted(
        "llama", "lora", base=adapters.plain("llama", tie_word_embeddings=True), modules_to_save=["lm_head"]
    )
    if backend == "shard":
        ts.distributed.init_process_group(2)
    try:
        found["frozen"] = says(try_fit, make(), frozen=True)
        found["base"] = says(try_fit, other_base(), checkpoint=trained, resume="auto", epochs=3)
        found["nothing"] = says(try_fit, make().requires_grad_(True), checkpoint=trained, epochs=3)
        found["model"], found["rank"] = says(try_load, "gpt2"), says(try_load, "rank")
        found["quantized"] = says(try_fit, Quantized()) if backend == "fsdp" else None
        if backend == "shard":
            found["quantized"] = says(ts.parallelize, Quantized(), {"up": ts.Column(), "down": ts.Row()})
            images = adapters.adapted("vit", "lora", target_modules=["projection", "fc1", "fc2"])
            path = next(name for name, _ in images.named_modules() if name.endswith("projection"))
            found["cut"] = says(ts.parallelize, images, {path: ts.Column()})
        else:
            found["copied"] = says(try_fit, copied)
    finally:
        if backend == "shard":
            ts.distributed.destroy_process_group()
    return found, len(steps)


SENTENCES = {
    "frozen": "parameters are all frozen, so training would change nothing",
    "base": "trained on another base: the first frozen weight that differs is "
    "'base_model.model.model.layers.1.mlp.up_proj.base_layer.weight' (its values are other ones)",
    "nothing": "leaves out frozen weights, and the model has none",
    "model": "does not fit the model's 'default': it lacks",
    "rank": "it has r=2, and the model's has r=4",
    "quantized": "'up.weight' is quantized (Params4bit)",
    "cut": "projection is a Conv2d",
    "copied": "is in modules_to_save, and shares 'weight' with",
}


@pytest.mark.slow
def test_each_rank_gets_the_same_sentence_before_the_first_step(places, tmp_path):
    adapters.adapted("gpt2", "lora").save_pretrained(tmp_path / "gpt2")
    adapters.adapted("llama", "lora", r=2).save_pretrained(tmp_path / "rank")
    model = adapters.make("llama", "lora")
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        trainer.fit(
            model,
            adapters.make_optimizer(model),
            adapters.loader("llama"),
            step=adapters.step,
            checkpoint=Checkpoints(tmp_path / "run", weights="trainable"),
        )
    for backend in ("ddp", "fsdp", "shard"):
        plan = adapters.plan_of("llama", "lora") if backend == "shard" else None
        (first, steps), (second, others) = places.run(2, refusals, tmp_path, backend, plan)
        assert steps == others == 0
        assert first == second
        for name, said in first.items():
            assert said is None or SENTENCES[name] in said, (backend, name, said)
