"""What makes an optimizer step: accumulation, clipping, precision, and gradients that are not finite."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, NonFiniteLossError
from tp_core.jobs import CompileOptions
from tp_trainer import GradientRules, Trainer

from tests.models import perceptron
from tests.reference_training import squared_error

make_model = functools.partial(perceptron, 3, 6, 2)


def make_data(n=22, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(n, 3, dtype=dtype, generator=generator),
        torch.randn(n, 2, dtype=dtype, generator=generator),
    )


def fit(
    *,
    batch_size=4,
    model=None,
    dtype=torch.float64,
    epochs=2,
    run_step=squared_error,
    data=None,
    trainer=None,
    **kw,
):
    with Trainer(seed=0, progress=False, devices="cpu", **(trainer or {})) as running:
        model = make_model(dtype=dtype) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(make_data(dtype=dtype) if data is None else data, batch_size=batch_size)
        history = running.fit(model, optimizer, loader, step=run_step, epochs=epochs, **kw)
        return [p.detach().clone() for p in model.parameters()], history


def assert_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# -- accumulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("small", "accumulate"), [(4, 3), (5, 2), (1, 12), (3, 99)])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_accumulated_batches_make_the_steps_of_large_ones(small, accumulate, loss):
    def run_step(model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction="sum") / (1 if loss == "sum" else len(x))

    steps, history = fit(
        batch_size=small, trainer={"accumulate": accumulate, "loss": loss}, run_step=run_step
    )
    whole, other = fit(batch_size=small * accumulate, trainer={"loss": loss}, run_step=run_step)
    assert_close(steps, whole)
    assert [r.steps for r in history] == [r.steps for r in other]
    assert [r.train["loss"] for r in history] == pytest.approx([r.train["loss"] for r in other])


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_wrong_number_of_batches_is_refused(wrong):
    with pytest.raises(ConfigError, match="accumulate must be a whole number from 1, got"):
        Trainer(accumulate=wrong)


# -- clipping --------------------------------------------------------------------------------------


def test_values_are_clipped():
    def run_step(model, batch):
        return 1e6 * squared_error(model, batch)

    before = [p.detach().clone() for p in make_model().parameters()]
    after, _ = fit(batch_size=22, epochs=1, run_step=run_step, gradients=GradientRules(clip_value=0.5))
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(after, before, strict=True)])
    torch.testing.assert_close(moved.max().item(), 0.1 * 0.5)


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
def test_a_limit_has_to_be_above_zero(name):
    with pytest.raises(ConfigError, match=f"{name} must be None or a number greater than 0, got 0"):
        GradientRules(**{name: 0})


# -- precision -------------------------------------------------------------------------------------


def test_mixed_precision_computes_low_and_keeps_parameters_high():
    seen = set()

    def run_step(model, batch):
        output = model(batch[0])
        seen.add(output.dtype)
        return (output.float() - batch[1]).square().mean()

    weights, _ = fit(dtype=torch.float32, run_step=run_step, trainer={"precision": "bf16-mixed"})
    expected, _ = fit(dtype=torch.float32)
    assert seen == {torch.bfloat16}
    assert {w.dtype for w in weights} == {torch.float32}
    assert_close(weights, expected, rtol=0.05, atol=0.02)


def test_true_bfloat16_takes_the_model_and_the_batches():
    weights, history = fit(dtype=torch.float32, trainer={"precision": "bf16-true"})
    assert {w.dtype for w in weights} == {torch.bfloat16}
    assert history[-1].train["loss"] < history[0].train["loss"]


def test_half_precision_leaves_out_steps_that_overflow_and_halves_the_scale():
    scales = []

    def run_step(model, batch):
        loss = squared_error(model, batch)
        loss.register_hook(lambda gradient: scales.append(gradient.item()))
        return loss * 1e30 if len(scales) == 2 else loss  # overflows once in a scaled gradient

    weights, _ = fit(dtype=torch.float32, run_step=run_step, trainer={"precision": "fp16-mixed"}, epochs=1)
    assert scales[0] == 65536.0
    assert scales[-1] == 32768.0
    assert all(torch.isfinite(w).all() for w in weights)


def test_an_unknown_precision_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"precision must be one of 'fp32', .*, got 'fp8'"):
        Trainer(precision="fp8")


def test_ones_own_loop_steps_through_update():
    with Trainer(seed=0, devices="cpu", precision="fp16-mixed") as trainer:
        model, optimizer, loader = trainer.prepare(
            *_with_optimizer(make_model(dtype=torch.float32)),
            DataLoader(make_data(dtype=torch.float32), batch_size=22),
        )
        (batch,) = loader
        with trainer.autocast():
            loss = squared_error(model, batch)
        trainer.backward(loss)
        assert trainer.update(model, optimizer, clip_norm=1.0)
        trainer.backward(squared_error(model, batch))
        with pytest.raises(ConfigError, match=r"gradients are scaled, .*trainer\.update"):
            optimizer.step()


def _with_optimizer(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# -- not finite ------------------------------------------------------------------------------------


def bad_at(*calls):
    def run_step(model, batch):
        run_step.calls += 1
        loss = squared_error(model, batch)
        return loss * float("nan") if run_step.calls in calls else loss

    run_step.calls = 0
    return run_step


def test_a_loss_that_is_not_finite_can_be_skipped():
    weights, history = fit(run_step=bad_at(2), gradients=GradientRules(nonfinite="skip"), epochs=1)
    assert all(torch.isfinite(w).all() for w in weights)
    assert history[0].samples == 18
    rest = TensorDataset(*(torch.cat([t[:4], t[8:]]) for t in make_data().tensors))
    expected, _ = fit(data=rest, epochs=1)
    assert_close(weights, expected)


def test_too_many_in_a_row_end_the_run():
    fit(run_step=bad_at(2, 3, 5, 6), gradients=GradientRules(nonfinite="skip", max_skipped=2))
    with pytest.raises(NonFiniteLossError, match="at optimizer step 4, 3 steps in a row"):
        fit(run_step=bad_at(2, 3, 4), gradients=GradientRules(nonfinite="skip", max_skipped=2))


def test_gradients_that_are_not_finite_end_the_run_where_they_are_looked_at():
    def run_step(model, batch):
        loss = squared_error(model, batch)
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    with pytest.raises(NonFiniteLossError, match=r"gradients' norm is .* at optimizer step 1"):
        fit(run_step=run_step, clip_norm=1.0)


def test_gradients_of_a_last_step_that_are_not_finite_end_the_run_before_anything_is_saved(tmp_path):
    calls = []

    def run_step(model, batch):
        calls.append(1)
        loss = squared_error(model, batch)
        if len(calls) == 12:  # the last one of the second epoch: no loss shows what it did
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    with pytest.raises(NonFiniteLossError, match=r"parameter '0.weight' .* after optimizer step 12"):
        fit(run_step=run_step, epochs=3, checkpoint=tmp_path)
    assert [folder.name for folder in sorted(tmp_path.glob("step-*"))] == ["step-0000000006"]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="nonfinite must be 'raise' or 'skip', got 'ignore'"):
        fit(gradients=GradientRules(nonfinite="ignore"))


# -- compilation -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch's compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [CompileOptions(backend="aot_eager"), True])
def test_a_compiled_model_trains_to_the_same_weights(compiled):
    weights, _ = fit(trainer={"compile": compiled})
    assert_close(weights, fit()[0])
