"""The seed's trainer: every documented name, in both modes and under every launcher."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as Sampler
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError, DeviceError, LaunchEnvironmentError, ModelError
from tp_testing import free_port, run_ranks
from tp_trainer import Parallel_Trainer, ParallelTrainer

from tests.accelerator import KIND

CPU = {"n_gpus": 2, "device": "cpu"}

MAIN = """
import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from tp_trainer import Parallel_Trainer


class Config(object):
    n_gpus = 2
    device = 'cuda'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description = 'yourdescription')
    parser.add_argument('--synch',
                        '-s',
                        action = 'store_true')
    args, unknown = parser.parse_known_args()
    synch = args.synch
    config = Config()
    trainer = Parallel_Trainer(synch, config)

    device = trainer.get_device()
    torch.manual_seed(0)
    model = trainer.model_parallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(0, 1, 16).reshape(16, 1)
    dataset = TensorDataset(x, 2 * x + 1)
    sampler = trainer.dataset_parallel(dataset)
    with open('log.txt', 'a') as log_file:
        for epoch in range(150):
            for a, b in trainer.get_loader(dataset, epoch, 4, 0, sampler):
                loss = (model(a.to(device)) - b.to(device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        trainer.write_log(log_file, 'loss %.4f' % loss.item())
    trainer.save_model({'epoch': epoch}, model, 'model.pt')
    weight = trainer.get_model(model).weight.item()
    trainer.call_func(print, 'weight %.2f' % weight)
"""


OLD_STYLE = ("--nproc_per_node=2", "--master_port=PORT", "--use_env")


def command(*launcher):
    return [sys.executable, *launcher]


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(command("main.py"), marks=pytest.mark.slow),
        pytest.param(
            command(
                "-m",
                "torch.distributed.run",
                "--nproc_per_node=2",
                "--master_port=PORT",
                "main.py",
                "--synch",
            ),
            marks=pytest.mark.nightly,  # the next one sets the same variables
        ),
        pytest.param(
            command("-m", "torch.distributed.launch", *OLD_STYLE, "main.py", "-s"), marks=pytest.mark.slow
        ),
        pytest.param(
            command("-m", "tp_core.cli", "launch", "-n", "2", "main.py", "--synch"), marks=pytest.mark.nightly
        ),
    ],
    ids=["python", "torchrun", "torch.distributed.launch", "tp launch"],
)
def test_the_seeds_main_runs_unchanged(start, tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    start = [word.replace("PORT", str(free_port())) for word in start]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weight") == 1
    assert float(done.stdout.split("weight ")[1].split()[0]) == pytest.approx(2, abs=0.2)
    assert (tmp_path / "log.txt").read_text().count("loss") == 1
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["epoch"] == 149
    assert set(saved["state_dict"]) == {"weight", "bias"}
    assert "this machine has no cuda: the CPU is used" in done.stderr or torch.cuda.is_available()


def make(synch=False, config=CPU):
    return ParallelTrainer(synch, config)


def test_the_config_may_be_an_object_or_a_dict():
    class Config:
        n_gpus = 2
        device = "cpu"

    for config in (Config, Config(), CPU):
        assert make(config=config).get_device() == torch.device("cpu")


@pytest.mark.parametrize("config", [{"device": "cpu"}, type("C", (), {"n_gpus": 1})])
def test_a_config_that_lacks_something_is_told_what(config):
    with pytest.raises(ConfigError, match=r"config lacks the (key 'n_gpus'|attribute 'device')"):
        make(config=config)


@pytest.mark.parametrize("n_gpus", [0, -1, True, "2", None])
def test_a_number_of_processes_that_is_none_is_refused(n_gpus):
    with pytest.raises(ConfigError, match=r"n_gpus must be a whole number from 1, got"):
        make(config={"n_gpus": n_gpus, "device": "cpu"})


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"config.device must be a device"):
        make(config={"n_gpus": 1, "device": 1.5})


@pytest.mark.gpu
def test_an_accelerator_that_does_not_exist_is_refused():
    with pytest.raises(DeviceError, match="99"):
        make(config={"n_gpus": 1, "device": f"{KIND}:99"})


def test_synch_without_a_launcher_says_how_to_start():
    with pytest.raises(ConfigError, match=r"tp launch -n 2 script.py"):
        make(synch=True)


def test_a_half_set_environment_is_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError, match="LOCAL_RANK"):
        make(synch=True)


def test_without_synch_a_model_is_trained_as_it_is():
    trainer, model = make(), nn.Linear(1, 1).eval()
    prepared = trainer.model_parallel(model)
    assert prepared is model
    assert prepared.training
    assert trainer.get_model(prepared) is model
    assert trainer.dataset_parallel([1, 2]) is None


def test_a_wrapped_model_is_refused():
    with pytest.raises(ModelError, match="already wrapped"):
        make().model_parallel(nn.DataParallel(nn.Linear(1, 1)))


def test_call_func_returns_what_the_function_returns():
    assert make().call_func(lambda a, b: a + b, 1, b=2) == 3


def test_logs_go_to_open_files_and_to_paths(tmp_path):
    trainer, buffer = make(), io.StringIO()
    trainer.write_log(buffer, "one")
    for line in ("one", "two"):
        trainer.write_log(tmp_path / "log.txt", line)
    assert buffer.getvalue() == "one\n"
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n"


def test_saving_puts_the_state_into_the_callers_dict_too(tmp_path):
    trainer, model, ckpt = make(), nn.Linear(1, 1), {"lr": 0.1}
    trainer.save_model(ckpt, model, tmp_path / "m.pt")
    assert ckpt["state_dict"].keys() == model.state_dict().keys()
    assert torch.load(tmp_path / "m.pt", weights_only=True)["lr"] == 0.1


def test_the_device_is_an_attribute_and_a_method():
    trainer = make()
    assert trainer.device == trainer.get_device() == torch.device("cpu")


def test_each_epoch_has_an_order_of_its_own_that_can_be_had_again():
    def order(epoch, seed=0):
        trainer = make(config={**CPU, "seed": seed})
        return [b.tolist() for b in trainer.get_loader(torch.arange(20), epoch, 6, 0)]

    assert order(0) == order(0) != order(1)
    assert order(0, seed=1) != order(0)
    assert sorted(sum(order(3), [])) == list(range(20))


def test_a_sampler_of_ones_own_is_used():
    loader = make().get_loader(torch.arange(4), 0, 2, 0, torch.utils.data.SequentialSampler(range(4)))
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]


def in_two_processes():
    trainer = make(synch=True)
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    sampler = trainer.dataset_parallel(data)
    assert isinstance(sampler, DistributedSampler)
    ordered = trainer.dataset_parallel(data, shuffle=False)
    model = trainer.model_parallel(nn.Linear(1, 1))
    return {
        "ddp": isinstance(model, DistributedDataParallel),
        "unused": model.find_unused_parameters,
        "called": trainer.call_func(lambda: "called"),
        "batches": [b[0].flatten().tolist() for b in trainer.get_loader(data, 2, 2, 0, sampler)],
        "ordered": list(ordered),
        "plain": type(trainer.get_model(model)).__name__,
    }


def test_with_synch_each_rank_has_its_share_of_the_same_order():
    first, second = run_ranks(in_two_processes, 2)
    assert (first["ddp"], first["plain"]) == (True, "Linear")
    assert first["unused"] is False
    assert (first["called"], second["called"]) == ("called", None)
    assert (first["ordered"], second["ordered"]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    whole = list(_whole_order(epoch=2))
    assert sum(first["batches"], []) == whole[0::2]
    assert sum(second["batches"], []) == whole[1::2]


def _whole_order(epoch):
    sampler = Sampler(range(8), num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(epoch)
    return [float(i) for i in sampler]


def with_three_gpus():
    with pytest.raises(ConfigError) as caught:
        make(synch=True, config={"n_gpus": 3, "device": "cpu"})
    return str(caught.value)


def test_a_number_of_processes_that_was_not_started_is_named():
    for message in run_ranks(with_three_gpus, 2):
        assert "config.n_gpus is 3, but 2 processes were started" in message


def with_unused_parameters():
    config = {**CPU, "find_unused_parameters": True}
    return make(synch=True, config=config).model_parallel(nn.Linear(1, 1)).find_unused_parameters


def test_options_of_ddp_are_read_from_the_config():
    assert run_ranks(with_unused_parameters, 2) == [True, True]


def on_the_second_host():
    """One process on each of two hosts: the local rank is 0 on both."""
    trainer = make(synch=True, config={"n_gpus": 1, "device": "cpu"})
    environment = LaunchEnvironment.read()
    return environment.local_rank, trainer.call_func(lambda: "writes")


def test_the_global_rank_decides_who_writes():
    def pretend():
        rank = os.environ["RANK"]
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank, GROUP_WORLD_SIZE="2")
        return on_the_second_host()

    assert run_ranks(pretend, 2) == [(0, "writes"), (0, None)]


def test_both_spellings_are_one_class():
    assert Parallel_Trainer is ParallelTrainer
    assert json.dumps(ParallelTrainer.__name__) == '"ParallelTrainer"'
