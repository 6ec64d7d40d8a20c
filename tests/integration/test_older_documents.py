"""The documents of the five older tools, sentence by sentence: each is true of the package in its place.

What a document says of devices is asked of the CPU. The comments name the sentences that are true in another
form.
"""

import io
import json
import subprocess
import sys

import pytest
import torch
import tp_dp_gather
import tp_shard as ts
import tp_tuple
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, DeviceError
from tp_runner.compat import CfgNode, OrderedRunner, UnorderedRunner
from tp_testing import free_port, run_ranks
from tp_trainer import Parallel_Trainer
from tp_tuple.compat import cuda_fields

CPUS = ["cpu", "cpu"]


def said(sentences):
    """Return the sentences that are not true, with what happened."""
    wrong = {}
    for sentence, (call, expected) in sentences.items():
        try:
            found = call()
        except Exception as error:  # noqa: BLE001 - some sentences are about errors
            found = type(error)
        if found != expected:
            wrong[sentence] = found
    return wrong


# -- tuple_parallel -------------------------------------------------------------------------------


class HasCuda:
    def cuda(self, device=None, **kwargs):
        return "cuda", device, kwargs


class HasTo:
    def to(self, *args, **kwargs):
        return "to"


class Fields(tp_tuple.Batch):
    def __init__(self):
        self.x = torch.ones(1)


class Custom:
    def __init__(self, x):
        self.x, self.calls = x, []

    def to(self, *args, **kwargs):
        self.calls.append((args, "non_blocking" in kwargs))
        return self


class OfCustom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, batch):
        return self.linear(batch.x)


class TwoValues(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y.sum(1)


class Detections(nn.Linear):
    def forward(self, x):
        return [{"score": row} for row in super().forward(x)]


class CollateFunction:  # of example.py
    def __init__(self, ndevices):
        self.ndevices = ndevices

    def __call__(self, data_list):
        return torch.stack(data_list).chunk(self.ndevices)


def example():
    loader = DataLoader(torch.randn(10, 5), batch_size=4, shuffle=True, collate_fn=CollateFunction(2))
    model = tp_tuple.TupleParallel(nn.Linear(5, 2), device_ids=CPUS)
    model.to(CPUS[0])
    return [[len(output) for output in model(data)] for data in loader]


def custom_calls():
    parts = Custom(torch.ones(2, 5)), Custom(torch.ones(1, 5))
    outputs = tp_tuple.TupleParallel(OfCustom(), CPUS)(parts)
    return [tuple(output.shape) for output in outputs], parts[0].calls


def shapes(model, parts, **options):
    found = tp_tuple.TupleParallel(model, CPUS, **options)(parts)
    return [tuple(each.shape) for each in (found if isinstance(found, tuple | list) else [found])]


PARTS = torch.ones(2, 5), torch.ones(1, 5)
TUPLE = {
    # Its one keyword is non_blocking, which does not go to the CPU: nobody would wait for the copy.
    "recursive_cuda: .cuda, on lists, tuples and dicts": (
        lambda: tp_tuple.recursive_cuda({"a": [HasCuda()], "b": ("x",)}, "cpu", non_blocking=True),
        {"a": [("cuda", torch.device("cpu"), {})], "b": ("x",)},
    ),
    "if val has no .cuda then .to": (lambda: tp_tuple.recursive_cuda([HasTo()], "cpu"), ["to"]),
    # The current CUDA device, where there is one; here the error says that there is none.
    "without a device the current one": (lambda: tp_tuple.recursive_cuda(torch.ones(1)), DeviceError),
    "tp_collate(ndevices)(collate_fn)": (
        lambda: [part.tolist() for part in tp_tuple.tp_collate(2)(torch.tensor)([1, 2, 3, 4, 5])],
        [[1, 2, 3], [4, 5]],
    ),
    "default_collate(ndevices)": (
        lambda: [[x.tolist() for x in value] for value in tp_tuple.default_collate(2)([(1, 2.0), (3, 4.0)])],
        [[[1], [3]], [[2.0], [4.0]]],
    ),
    # As the document writes it, without a number of devices: an error that says what to write.
    "DataLoader(collate_fn=default_collate)": (
        lambda: next(iter(DataLoader([1.0, 2.0], 2, collate_fn=tp_tuple.default_collate))),
        ConfigError,
    ),
    "tuple_fn": (lambda: tp_tuple.tuple_fn(lambda x, y: (x + y, x * y))((1, 2), (3, 4)), ((4, 6), (3, 8))),
    "cuda_attrs returns obj": (lambda: type(tp_tuple.cuda_attrs(Fields(), "cpu")), Fields),
    "Batch.cuda calls cuda_fields": (
        lambda: (Fields().cuda("cpu").x.item(), cuda_fields(Fields(), "cpu").x.item()),
        (1.0, 1.0),
    ),
    "Tuplewise: getitem and getattribute": (
        lambda: (
            tp_tuple.Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4],
            [tuple(shape) for shape in tp_tuple.Tuplewise([torch.ones(2), torch.ones(3)]).shape],
        ),
        (True, [(2,), (3,)]),
    ),
    "cat of one value and of two": (
        lambda: (
            shapes(nn.Linear(5, 2), PARTS, transfer_output=True, reduction=tp_tuple.cat),
            shapes(TwoValues(5, 2), PARTS, transfer_output=True, reduction=tp_tuple.cat),
        ),
        ([(3, 2)], [(3, 2), (3,)]),
    ),
    "TupleParallel extends DataParallel, and forwards its arguments": (
        lambda: (
            isinstance(tp_tuple.TupleParallel(nn.Linear(5, 2), CPUS), nn.DataParallel),
            shapes(nn.Linear(5, 2), PARTS, output_device="cpu", dim=0),
        ),
        (True, [(2, 2), (1, 2)]),
    ),
    "custom types are moved by .to(non_blocking=)": (
        custom_calls,
        ([(2, 2), (1, 2)], [((torch.device("cpu"),), True)]),
    ),
    "forward() returns a tuple of outputs": (
        lambda: [len(part) for part in tp_tuple.TupleParallel(Detections(5, 2), CPUS)(PARTS)],
        [2, 1],
    ),
    "example.py": (example, [[2, 2], [2, 2], [1, 1]]),
}


# -- The DataParallel of the tutorial -------------------------------------------------------------


class TestCaseOne(nn.Module):
    __test__ = False

    def __init__(self):
        super().__init__()
        self.netA, self.netB = nn.Linear(5, 2), nn.Linear(2, 1)
        self.optimizer_A = torch.optim.Adam(self.netA.parameters(), lr=1e-4, betas=(0.5, 0.9))

    def convert_data_parallel(self):
        self.netA = tp_dp_gather.DataParallel(self.netA, CPUS, gather_to_one_device=False)
        self.netB = tp_dp_gather.DataParallel(self.netB, CPUS, inputs_are_scattered=True)

    def forward(self, x):
        a = self.netA(x)
        b = self.netB(a)
        b.mean().backward()
        self.optimizer_A.step()
        return type(a), tuple(a[0].shape), tuple(b.shape)


class ComplexA(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return {"outputs": {"out1": output, "out2": output}, "second_output": output}


def case_one():
    model = TestCaseOne()
    model.convert_data_parallel()
    before = model.netA.module.weight.clone()
    found = model(torch.ones(16, 5))
    return *found, torch.equal(before, model.netA.module.weight)


def case_two():
    first = tp_dp_gather.DataParallel(ComplexA(5, 2), CPUS, except_keywords=["out1", "out2"])
    last = tp_dp_gather.DataParallel(nn.Linear(2, 1), CPUS, inputs_are_scattered=True)
    found = first(torch.ones(16, 5))
    out1, out2 = found["outputs"]["out1"], found["outputs"]["out2"]
    inputs = tuple(one + two for one, two in zip(out1, out2, strict=True))
    return type(out1), tuple(out1[0].shape), tuple(found["second_output"].shape), tuple(last(inputs).shape)


GATHER = {
    "test case one": (case_one, (tuple, (8, 2), (16, 1), False)),
    "test case two": (case_two, (tuple, (8, 2), (16, 2), (16, 1))),
    "sort_and_gather": (
        lambda: tuple(
            tp_dp_gather.DataParallel(nn.Linear(5, 2), CPUS, sort_and_gather=True)(torch.ones(16, 5)).shape
        ),
        (16, 2),
    ),
}


# -- torchhandy: further names are in tests/tp_trainer/trainer/test_parallel_trainer.py -------------


class Config:
    n_gpus = 2
    device = "cpu"


def trained(tmp_path):
    trainer = Parallel_Trainer(False, Config())
    model = trainer.model_parallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval())
    dataset = TensorDataset(torch.arange(10.0))
    sampler = trainer.dataset_parallel(dataset)
    names = {"dataset": dataset, "epoch": 0, "bsz": 4, "num_workers": 0, "train_sampler": sampler}
    ckpt, log = {"epoch": 3}, io.StringIO()
    trainer.save_model(ckpt, model, tmp_path / "m.pt")
    trainer.write_log(log, "hello")
    return {
        "a class or a dict": type(Parallel_Trainer(False, {"device": "cpu", "n_gpus": 1}).device).__name__,
        "get_device, device": (str(trainer.get_device()), str(trainer.device)),
        "model_parallel, get_model": (model.training, trainer.get_model(model) is model),
        "get_loader": len(trainer.get_loader(**names)),
        "save_model": (sorted(torch.load(tmp_path / "m.pt")), sorted(ckpt)),
        "write_log": log.getvalue(),
        "call_func": trainer.call_func(lambda a, b=0: a + b, 1, b=2),
    }


HANDY = {
    "a class or a dict": "device",
    "get_device, device": ("cpu", "cpu"),
    "model_parallel, get_model": (True, True),
    "get_loader": 3,
    "save_model": (["epoch", "state_dict"], ["epoch", "state_dict"]),
    "write_log": "hello\n",
    "call_func": 3,
}
LAUNCHED = """
import argparse, torch
from tp_trainer import Parallel_Trainer

class Config(object):
    n_gpus = 2
    device = 'cpu'

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--synch', '-s', action='store_true')
    args, unknown = parser.parse_known_args()
    trainer = Parallel_Trainer(args.synch, Config())
    torch.manual_seed(0)
    model = trainer.model_parallel(torch.nn.Linear(2, 1))
    of_torch = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    print(args.synch, of_torch, flush=True)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch.distributed.launch
def test_the_commands_of_torchhandys_document_start_its_program(tmp_path):
    (tmp_path / "main.py").write_text(LAUNCHED)
    launch = ["-m", "torch.distributed.launch", "--nproc_per_node=2", "--use_env"]
    for before, after, expected in (
        ([], [], ["False False"]),
        (launch, ["--synch"], ["True True"] * 2),
    ):
        # Now: another program may take a port that was free when the first command began.
        port = [f"--master_port={free_port()}"] if before else []
        command = [sys.executable, *before, *port, "main.py", *after]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
        assert done.stdout.splitlines() == expected, done.stderr


# -- easycore -------------------------------------------------------------------------------------


class SumOfSquares(UnorderedRunner):
    @staticmethod
    def producer_work(device, cfg, data):
        return data * data

    @staticmethod
    def consumer_init(cfg):
        cfg.sum = 0

    @staticmethod
    def consumer_work(cfg, data):
        cfg.sum += data

    @staticmethod
    def consumer_end(cfg):
        return cfg.sum


class SumOfPowers(SumOfSquares):
    @staticmethod
    def producer_work(device, cfg, data):
        return data**cfg.exponent


class Predictor(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.model = nn.Linear(1, 3).to(device)

    @staticmethod
    def producer_work(device, cfg, data):
        with torch.no_grad():
            return cfg.model(torch.Tensor(data).view(-1, 1).to(device)).cpu()

    @staticmethod
    def producer_end(device, cfg):
        del cfg.model

    @staticmethod
    def consumer_init(cfg):
        cfg.data_list = []

    @staticmethod
    def consumer_work(cfg, data):
        cfg.data_list.append(data)

    @staticmethod
    def consumer_end(cfg):
        return torch.cat(cfg.data_list, dim=0)


def called(kind, items, **options):
    runner = kind(start_method="fork", **options)
    result = runner(items)
    runner.close()
    return result


def again():
    runner = SumOfSquares(devices=3, start_method="fork")
    states = [runner.is_activate]
    runner.close()
    states.append(runner.is_activate)
    runner.activate()
    states.append(runner(range(3)))
    runner.close()
    return states


def configured(path):
    cfg = CfgNode()
    cfg.exponent = 3
    cfg.save(path)
    cfg.freeze()
    return called(SumOfPowers, range(100), devices=2, cfg=CfgNode.open(path)), cfg.is_frozen()


def merged():
    cfg = CfgNode({"a": 1})
    cfg.merge(CfgNode({"b": {"c": 2}}))
    return cfg


def easycore(tmp_path):
    return {
        "example 1: devices=3, or a list of str": (
            lambda: [
                called(SumOfSquares, range(100), devices=devices) for devices in (3, ["cpu", "cpu", "cpu"])
            ],
            [328350] * 2,
        ),
        "examples 2 and 3: a network, and batches of a generator": (
            lambda: tuple(called(Predictor, ([n] * 10 for n in range(10)), devices=2).shape),
            (100, 3),
        ),
        "example 4: parameters in a CfgNode": (lambda: configured(tmp_path / "cfg.yaml"), (24502500, True)),
        "is_activate, close, activate": (again, [True, False, 5]),
        "CfgNode: merge, dict, dump, load, copy": (
            lambda: (
                merged().dict(),
                CfgNode.load(CfgNode.dump(CfgNode({"a": 1}))).a,
                type(CfgNode().copy()),
            ),
            ({"a": 1, "b": {"c": 2}}, 1, CfgNode),
        ),
    }


# -- torchshard -----------------------------------------------------------------------------------


def torchshard(folder):
    """Return what is not true on this rank. A weight is torch's, [out, in], where the document swaps them."""
    ts.distributed.init_process_group(group_size=2)
    cut = {-1: (15, 20), 1: (15, 20), 0: (30, 10), None: (30, 20)}

    def round_trip(dim):
        layer = ts.nn.ParallelLinear(20, 30, dim=dim)
        whole = ts.collect_state_dict(layer, layer.state_dict())
        path = f"{folder}/{ts.distributed.get_rank()}.pt"
        torch.save({"state_dict": whole}, path)
        own = ts.relocate_state_dict(layer, torch.load(path)["state_dict"])
        layer.load_state_dict(own)
        sizes = layer.weight, whole["weight"], own["weight"]
        return [tuple(weight.shape) for weight in sizes]

    def marked():
        data, other = torch.empty(20, 30), torch.empty(2)
        ts.register_parallel_dim(data, -1)
        setattr(other, ts._PARALLEL_DIM, -1)
        param = torch.empty(20, 30)
        ts.register_parallel_attribute(param, -1, 1)
        return [ts.get_parallel_dim(each) for each in (torch.empty(2), data, other, param)]

    def ignored(dim):
        model = nn.ModuleDict({"layer1": nn.Linear(20, 20), "layer2": ts.nn.ParallelLinear(20, 30, dim=dim)})
        return ts.register_ddp_parameters_to_ignore(model)

    layer = ts.nn.ParallelLinear(20, 30, dim=0)
    sentences = {
        "slice(tensor, 2, dim=-1)": (
            lambda: [tuple(part.shape) for part in ts.slice(torch.empty(3, 10), 2, dim=-1)],
            [(3, 5), (3, 5)],
        ),
        "slice, dim=None, contiguous": (
            lambda: [part.is_contiguous() for part in ts.slice(torch.empty(4, 10), 2, contiguous=True)],
            [True, True],
        ),
        **{
            f"collect and relocate, dim={dim}": (lambda d=dim: round_trip(d), [shape, (30, 20), shape])
            for dim, shape in cut.items()
        },
        "prefix": (
            lambda: list(ts.collect_state_dict(layer, layer.state_dict(), prefix="p.")),
            ["p.weight", "p.bias"],
        ),
        # In "Usage" the document leaves out the second argument, which its own signature requires.
        "collect_state_dict(model)": (lambda: ts.collect_state_dict(layer), TypeError),
        "get_, register_parallel_dim, _attribute": (marked, [None, -1, -1, -1]),
        "get_parallel_dim(output)": (
            lambda: ts.get_parallel_dim(ts.nn.ParallelLinear(20, 30, dim=-1)(torch.empty(4, 20))),
            -1,
        ),
        "register_ddp_parameters_to_ignore": (lambda: ignored(None), ["layer2.weight", "layer2.bias"]),
        "_PARALLEL_ATTR, _ORDER_TYPE, and the package's own _ORDER_ATTR": (
            lambda: {type(getattr(ts, name)) for name in ("_PARALLEL_ATTR", "_ORDER_TYPE", "_ORDER_ATTR")},
            {str},
        ),
    }
    return said(sentences)


# -- All of them ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_sentence_of_the_older_documents_is_true(tmp_path):
    pytest.importorskip("yaml")
    wrong = {
        "tuple_parallel": said(TUPLE),
        "the tutorial": said(GATHER),
        "torchhandy": {name: found for name, found in trained(tmp_path).items() if found != HANDY[name]},
        "easycore": said(easycore(tmp_path)),
        "torchshard": {n: each for n, each in enumerate(run_ranks(torchshard, 2, str(tmp_path))) if each},
    }
    assert json.dumps({tool: found for tool, found in wrong.items() if found}, default=str) == "{}"
