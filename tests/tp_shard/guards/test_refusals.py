"""What others' code would silently do wrong with shards is refused, in words that say what to do."""

import warnings

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import (
    clip_grad_norm_,  # before any layer is split, as scripts do
    parametrizations,
)
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError, DisagreementError, ModelError, StateError
from tp_core.plugins import Job

from tests.installed import backend_class

ShardBackend = backend_class("shard")

Column, Row = ts.Column, ts.Row


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None):
        return self.state_dict() if state_dict is None else state_dict


def split():
    return ts.parallelize(Mlp(), {"up": Column(), "down": Row()})


def trained():
    model = split()
    model(torch.randn(4, 8)).square().sum().backward()
    return model


def optimizers_of_whole_matrices_are_refused_before_their_first_step():
    model = trained()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    named = type("DistributedShampoo", (torch.optim.SGD,), {})
    before = [p.detach().clone() for p in model.parameters()]
    for make, name in [
        (lambda: torch.optim.Adafactor(model.parameters()), "Adafactor"),
        (lambda: torch.optim.Muon(matrices), "Muon"),
        (lambda: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda: named(model.parameters(), lr=0.1), "DistributedShampoo"),
    ]:
        with pytest.raises(ConfigError, match=f"{name} computes with whole matrices"):
            make().step(lambda: 0.0)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    whole = [p for p in model.parameters() if p is model.norm.weight]
    torch.optim.Adafactor(whole).step()
    torch.optim.AdamW(model.parameters()).step()


def torchs_own_clipping_is_refused():
    model = trained()
    with pytest.raises(ConfigError, match=r"call ts.clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match=r"call ts.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.down.weight, 1.0)
    clip_grad_norm_(model.norm.parameters(), 1.0)
    ts.clip_grad_norm_(model, 1.0)


def norms_of_split_weights_are_refused():
    x = torch.randn(2, 8)
    for name in ("spectral_norm", "weight_norm", "orthogonal"):
        model = split()
        with pytest.raises(ModelError, match=r"would take the norm of this rank's shard"):
            getattr(parametrizations, name)(model.up)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the older functions
        for transform in (nn.utils.spectral_norm, nn.utils.weight_norm):
            model = split()
            with pytest.raises(ModelError, match="would take the norm of this rank"):
                transform(model.down)


def other_parametrizations_stay_allowed():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = split()
    nn.utils.parametrize.register_parametrization(model.up, "weight", Twice())
    model(torch.randn(2, 8)).sum().backward()


def a_parametrization_that_needs_the_whole_weight_is_refused():
    class Centered(nn.Module):
        def forward(self, weight):
            return weight - weight.mean(0)

    model = split()
    nn.utils.parametrize.register_parametrization(model.up, "weight", Centered())  # over the split outputs
    with pytest.raises(ModelError, match=r"Centered of .* would compute with this rank's shard"):
        model(torch.randn(2, 8))
    model = split()
    nn.utils.parametrize.register_parametrization(model.down, "weight", Centered())  # over the whole ones
    model(torch.randn(2, 8)).sum().backward()


def parameters_that_come_later_are_checked_as_well():
    model = trained()
    optimizer = torch.optim.Adafactor([model.norm.weight])
    optimizer.step()
    optimizer.add_param_group({"params": [model.up.weight]})
    with pytest.raises(ConfigError, match="Adafactor computes with whole matrices"):
        optimizer.step()


def save_pretrained_says_how_to_save_a_split_model():
    model = split()
    with pytest.raises(StateError, match=r"ts.collect_state_dict\(model"):
        model.save_pretrained("folder")
    state = ts.collect_state_dict(model, model.state_dict())
    assert model.save_pretrained("folder", state_dict=state) is state
    assert model.save_pretrained("folder", True, state) is state
    assert list(Mlp().save_pretrained("folder")) == list(state)


def a_session_compares_gradients_once_and_in_debug_mode_always():
    session = opened()
    model = session.prepare_model(split())
    factor = [1.0]
    model.norm.weight.register_hook(lambda g: g * factor[0])
    x = torch.randn(4, 8)
    factor[0] = 1.0 + ts.distributed.get_rank()
    with pytest.raises(DisagreementError, match="gradients of norm"):
        session.backward(model(x).sum())
    factor[0] = 1.0
    model.zero_grad()
    session.backward(model(x).sum())
    factor[0] = 1.0 + ts.distributed.get_rank()
    session.backward(model(x).sum())
    with ts.distributed.debug(), pytest.raises(DisagreementError, match="gradients of norm"):
        session.backward(model(x).sum())
    with pytest.raises(ConfigError, match="LBFGS computes with whole matrices, all at once"):
        session.prepare_optimizer(torch.optim.LBFGS(model.parameters()))


def a_session_compares_gradients_again_where_other_parameters_are_trained():
    session = opened()
    model = session.prepare_model(split())
    model.norm.weight.requires_grad_(False)
    x = torch.randn(4, 8)
    session.backward(model(x).sum())
    model.norm.weight.requires_grad_(True)
    model.norm.weight.register_hook(lambda g: g * (1.0 + ts.distributed.get_rank()))
    with pytest.raises(DisagreementError, match="gradients of norm"):
        session.backward(model(x).sum())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Mlp(), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.body(x))


X, Y = torch.linspace(-1, 1, 32).view(4, 8), torch.tensor([0, 1, 2, 1])


def values_of(model, x):
    """What takes a part of the classes for all, by the name of the function that is to be named."""
    scores = model(x)
    chances = scores.tanh().softmax(-1)[:, :2]
    return {
        "cross_entropy": F.cross_entropy(scores, Y),
        "log_softmax": F.nll_loss(F.log_softmax(scores.view(2, 2, -1), -1).flatten(0, 1), Y),
        "softmax": -chances.log().mean(),
        "argmax": (scores.argmax(-1) == Y).double().mean() + scores.argmax(-1).sum(),
        "topk": scores.topk(1).values.sum(),
        "mean": scores.square().mean(),
        "logsumexp": scores.transpose(0, 1).logsumexp(0).sum(),
        "normalize": F.normalize(scores, dim=-1).sum(),
        "layer_norm": F.layer_norm(scores, scores.shape[-1:]).square().cumsum(0).amax(),
        "the step's 'loss'": scores,
    }


def opened():
    return ShardBackend().open(Job(devices=resolve_devices(["cpu"]), environment=LaunchEnvironment.read()))


def classifier(**head):
    torch.manual_seed(0)
    return ts.parallelize(Classifier(), {"body.up": Column(), "body.down": Row(), "head": Column(**head)})


def functions_that_take_a_part_of_the_features_for_all_are_named_before_the_first_step():
    with opened() as session:
        for name in values_of(Classifier(), X):
            model = session.prepare_model(classifier())
            with pytest.raises(
                ModelError, match=rf"different values of 'loss' .*{name} has the output of 'head'"
            ):
                session.run(lambda model, x, name=name: values_of(model, x)[name], model, X)
        model = session.prepare_model(classifier())
        model.eval()

        def evaluated(model, x):
            scores = model(x)
            hits = (scores.argmax(-1) == Y).double() + scores.argmax(-1)
            return {"loss": ts.nn.functional.parallel_cross_entropy(scores, Y), "score": hits.mean().item()}

        with torch.no_grad(), pytest.raises(ModelError, match=r"different values of 'score' .*argmax has"):
            session.run_several(evaluated, [model], X)


def right_steps_of_split_outputs_are_no_fault():
    def joined(model, x):
        return F.cross_entropy(ts.distributed.gather(model(x), -1), Y)

    def of_shards(model, x):
        scores = model(x)
        loss = ts.nn.functional.parallel_cross_entropy(scores, Y)
        return {"loss": loss, "best": ts.distributed.gather(scores.relu(), -1).argmax(-1)}

    def by_hand(model, x):
        total = model(x).exp().sum(-1)
        return ts.distributed.reduce(total).log().mean()

    def of_blocks(model, x):
        return model.body(x).softmax(-1).square().mean()

    plain = Classifier()
    with opened() as session:
        for step in (joined, of_shards, by_hand, of_blocks):
            session.run(step, session.prepare_model(classifier()), X)
        whole = session.prepare_model(classifier(gather_output=True))
        for name in [n for n in values_of(plain, X) if " " not in n]:
            session.run(lambda model, x, name=name: values_of(model, x)[name], whole, X)


def penalized(model, x):
    return model(x).square().mean() + model.body.up.weight.square().sum()


def gated(model, x):
    return (model(x) * F.linear(x, model.body.up.weight[:1]).sigmoid()).mean()


def multiplied(model, x):
    return torch.einsum("bi,oi->bo", x, model.body.up.weight).tanh().mean() + model(x).mean()


def noted(model, x):
    model.body.norm.seen = model.body.norm.seen / 2 + model.body.down.weight.detach().norm()
    return model(x).mean()


def code_that_computes_with_a_shard_of_a_weight_is_named_before_the_first_step():
    functions = {penalized: "loss.*sum", gated: "loss.*__getitem__", multiplied: "loss.*einsum"}
    with opened() as session:
        for step, words in (functions | {noted: "buffer body.norm.seen.*norm"}).items():
            split = classifier(gather_output=True)
            split.body.norm.register_buffer("seen", torch.zeros(()))
            model = session.prepare_model(split)
            with pytest.raises(
                ModelError, match=f"{words} computes with 'body.*weight' outside of its layer"
            ):
                session.run(step, model, X)

        def joined(model, x):
            return model(x).mean() + ts.distributed.reduce(model.body.up.weight.square().sum())

        session.run(joined, session.prepare_model(classifier(gather_output=True)), X)


CHECKS = [
    optimizers_of_whole_matrices_are_refused_before_their_first_step,
    torchs_own_clipping_is_refused,
    norms_of_split_weights_are_refused,
    other_parametrizations_stay_allowed,
    save_pretrained_says_how_to_save_a_split_model,
    a_session_compares_gradients_once_and_in_debug_mode_always,
    a_session_compares_gradients_again_where_other_parameters_are_trained,
    a_parametrization_that_needs_the_whole_weight_is_refused,
    parameters_that_come_later_are_checked_as_well,
    functions_that_take_a_part_of_the_features_for_all_are_named_before_the_first_step,
    right_steps_of_split_outputs_are_no_fault,
    code_that_computes_with_a_shard_of_a_weight_is_named_before_the_first_step,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, check):
    on_ranks(2, check)
