"""What is asked before a model is known chooses no backend, or is answered for when the model comes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError, ModelError, SelectionError
from tp_core.plugins import Backend, Session, Verdict, hookimpl
from tp_testing import run_ranks
from tp_trainer import ParallelTrainer, Trainer

from tests.reference_training import mean_square


class Wide(Backend):
    """Knows only from the model whether it fits, as backends that split models do."""

    name = "wide"

    def assess(self, job):
        if job.traits is None:
            return Verdict.fits(1, "no model is known yet")
        if job.traits.parameter_count < 100:
            return Verdict.unfit("the model has less than 100 parameters")
        return Verdict.fits(90, "a model of 100 parameters or more")

    def open(self, job):
        return Session(job)


class Small(Backend):
    """The opposite one."""

    name = "small"

    def assess(self, job):
        if job.traits is not None and job.traits.parameter_count >= 100:
            return Verdict.unfit("the model has 100 parameters or more", remedy="take fewer")
        return Verdict.fits(80, "few parameters")

    def open(self, job):
        return Session(job)


class Plugin:
    @hookimpl
    def tp_backends(self):
        return [Wide(), Small()]


def make_trainer(**kwargs):
    plugins = PluginRegistry()
    plugins.register(Plugin(), name="sizes")
    return Trainer(plugins=plugins, progress=False, devices="cpu", **kwargs)


def loader():
    return DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)


def fit(trainer, model):
    trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), step=mean_square)
    return trainer.selection.chosen.name


QUESTIONS = {
    "device": lambda trainer: trainer.device,
    "rank": lambda trainer: trainer.rank,
    "local_rank": lambda trainer: trainer.local_rank,
    "world_size": lambda trainer: trainer.world_size,
    "is_main": lambda trainer: trainer.is_main,
    "selection": lambda trainer: str(trainer.selection),
    "autocast": lambda trainer: trainer.autocast().__enter__(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_starts_nothing_and_chooses_nothing(question):
    with make_trainer() as trainer:
        QUESTIONS[question](trainer)
        assert trainer._preparation.current is None
        assert fit(trainer, nn.Linear(3, 100)) == "wide"


def test_who_this_process_is_is_known_before_and_after_from_the_environment(monkeypatch):
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (
        environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "1"}
    ).items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(devices="cpu")
    assert (trainer.rank, trainer.world_size, trainer.local_rank, trainer.is_main) == (3, 4, 1, False)
    assert trainer.device == torch.device("cpu")


def answers(trainer):
    return trainer.rank, trainer.local_rank, trainer.world_size, trainer.is_main, str(trainer.device)


def before_and_after():
    with Trainer(devices="cpu", progress=False) as trainer:
        before = answers(trainer)
        trainer.prepare(nn.Linear(3, 1))
        return before, answers(trainer)


def test_ranks_answer_the_same_before_the_session_is_open_and_after(two_ranks):
    for rank, (before, after) in enumerate(two_ranks.run(before_and_after)):
        assert before == after == (rank, rank, 2, rank == 0, "cpu")


EARLY = {
    "trainer.session": lambda trainer: trainer.session,
    "prepare()": lambda trainer: trainer.prepare(loader()),
    "gather_for_metrics()": lambda trainer: trainer.gather_for_metrics(torch.ones(1)),
}


@pytest.mark.parametrize("what", EARLY)
def test_an_early_choice_that_does_not_fit_the_model_is_an_error_that_names_what_was_early(what):
    with make_trainer() as trainer:
        EARLY[what](trainer)
        assert trainer.selection.chosen.name == "small"
        with pytest.raises(SelectionError) as caught:
            fit(trainer, nn.Linear(3, 100))
    words = str(caught.value)
    assert f"backend 'small' was chosen when {what} started the job, without a model" in words
    assert "the model has 100 parameters or more; take fewer" in words
    assert "call fit(model, ...) or prepare(model, ...) before it" in words


@pytest.mark.parametrize("what", EARLY)
def test_an_early_choice_that_fits_the_model_goes_on(what):
    with make_trainer() as trainer:
        EARLY[what](trainer)
        assert fit(trainer, nn.Linear(3, 1)) == "small"


@pytest.mark.parametrize("what", EARLY)
def test_an_early_choice_by_name_is_assessed_too(what):
    with make_trainer(backend="wide") as trainer:
        EARLY[what](trainer)
        with pytest.raises(SelectionError, match=r"'wide' was chosen .* less than 100 parameters"):
            fit(trainer, nn.Linear(3, 1))


def test_an_early_choice_that_would_be_another_one_for_the_model_is_an_error():
    class Middle(Small):
        name = "middle"

        def assess(self, job):
            return Verdict.fits(85, "anything")

    class More(Plugin):
        @hookimpl
        def tp_backends(self):
            return [Middle(), Wide()]

    plugins = PluginRegistry()
    plugins.register(More(), name="more")
    with Trainer(plugins=plugins, progress=False, devices="cpu") as trainer:
        assert trainer.session
        with pytest.raises(
            SelectionError, match=r"for this model it would be 'wide'.*Trainer\(backend='middle'\)"
        ):
            fit(trainer, nn.Linear(3, 100))
    with Trainer(plugins=plugins, progress=False, devices="cpu", backend="middle") as trainer:
        assert trainer.session
        assert fit(trainer, nn.Linear(3, 100)) == "middle"


METHODS = {
    "evaluate": lambda trainer, model, path: trainer.evaluate(model, loader(), step=mean_square),
    "save_model": lambda trainer, model, path: trainer.save_model(model, path / "model.pt"),
    "load_model": lambda trainer, model, path: trainer.load_model(model, path / "whole.pt"),
    "export": lambda trainer, model, path: trainer.export(model, path / "model.safetensors"),
    "no_sync": lambda trainer, model, path: trainer.no_sync(model),
    "clip_grad_norm": lambda trainer, model, path: trainer.clip_grad_norm(model, 1.0),
    "update": lambda trainer, model, path: trainer.update(model, torch.optim.SGD(model.parameters(), lr=0.1)),
}


def give_gradients(model):
    """As a backward pass does, after which a step comes."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_given_a_model_chooses_for_it(tmp_path, method):
    model = nn.Linear(3, 100)
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    give_gradients(model)
    with make_trainer() as trainer:
        METHODS[method](trainer, model, tmp_path)
        assert trainer.selection.chosen.name == "wide"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_given_another_model_looks_whether_the_choice_fits_it(tmp_path, method):
    model = nn.Linear(3, 100)
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    give_gradients(model)
    with make_trainer() as trainer:
        fit(trainer, nn.Linear(3, 1))
        with pytest.raises(SelectionError, match=r"with the models before, and does not fit.*in one call"):
            METHODS[method](trainer, model, tmp_path)


def test_a_loss_of_a_model_that_nobody_prepared_is_refused():
    loss = nn.Linear(3, 1)(torch.ones(3)).sum()
    with (
        make_trainer() as trainer,
        pytest.raises(ConfigError, match=r"backward\(\) comes after the preparation"),
    ):
        trainer.backward(loss)


@pytest.mark.parametrize("widths", [(1, 100), (100, 1)])
def test_all_models_of_one_call_decide_together(widths):
    with make_trainer() as trainer:
        models = trainer.prepare(*(nn.Linear(3, n) for n in widths))
        assert [model.out_features for model in models] == list(widths)
        assert trainer.selection.chosen.name == "wide"


def test_a_model_that_comes_later_is_judged_together_with_those_before():
    with make_trainer() as trainer:
        wide = trainer.prepare(nn.Linear(3, 100))  # held: what has ended counts no more
        trainer.prepare(nn.Linear(3, 1))  # alone it would not fit
        assert trainer.selection.chosen.name == "wide"
        del wide


# -- models that are split already -----------------------------------------------------------------


def split_model():
    model = nn.Linear(3, 1)
    model.weight.tp_sharded = True
    return model


def refused(make, error, **kwargs):
    with Trainer(devices="cpu", progress=False, **kwargs) as trainer, pytest.raises(error) as caught:
        fit(trainer, make())
    return str(caught.value)


def test_a_split_model_in_one_process_is_refused():
    assert "the model has sharded parameters" in refused(split_model, SelectionError)


def early_questions_of_a_split_model():
    with Trainer(devices="cpu", progress=False) as trainer:
        assert trainer.session
        with pytest.raises(SelectionError) as by_fit:
            fit(trainer, split_model())
        with pytest.raises(ModelError) as by_session:
            trainer.session.prepare_model(split_model())
    return str(by_fit.value), str(by_session.value)


def test_a_split_model_is_never_averaged_by_ddp():
    for by_fit, by_session in run_ranks(early_questions_of_a_split_model, 2):
        assert "'ddp' was chosen when trainer.session started the job, without a model" in by_fit
        assert "pip install tp-shard" in by_fit
        assert "the model's 'weight' is one rank's shard" in by_session


def old_face():
    trainer = ParallelTrainer(True, {"n_gpus": 2, "device": "cpu"})
    with pytest.raises(ModelError, match="the model's 'weight' is one rank's shard"):
        trainer.model_parallel(split_model())
    trainer.session.close()


def test_the_smaller_face_refuses_a_split_model_too():
    run_ranks(old_face, 2)


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 2)
    fully_shard(model)
    return model


def distributed():
    """Return a model that no backend takes over, as it does one of fully_shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    return model


def dtensor_models():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    messages = [refused(distributed, ModelError), refused(fully_sharded, ModelError, backend="ddp")]
    with Trainer(devices="cpu", progress=False) as trainer:
        assert trainer.session
        for use in (fit, lambda trainer, model: trainer.session.prepare_model(model)):
            with pytest.raises(ModelError) as caught:
                use(trainer, fully_sharded())
            messages.append(str(caught.value))
    dist.destroy_process_group()
    return messages


def test_a_model_of_dtensors_is_refused_with_a_sentence_by_what_cannot_run_it():
    for messages in run_ranks(dtensor_models, 2):
        for message in messages:
            assert "DTensor" in message
            assert "give the plain model" in message


def refused_in_one_process():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return refused(fully_sharded, ModelError)


def test_a_model_of_dtensors_in_one_process_is_refused():
    # On a rank: torch keeps the group in a cache, and a later fork of this process would crash on it.
    assert "give the plain model" in run_ranks(refused_in_one_process, 1)[0]
