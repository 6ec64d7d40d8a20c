"""Batch inference of a small transformer, end to end, beside DataLoader and a loop, joblib and Ray Data.

A BERT of two layers with random weights goes over the sources of the standard library, in pieces of 512
characters, batches of 32, two workers of one thread each. What is measured for each tool is the whole: start,
model in each worker, batches, results here; and the time to the first result. The first call of each tool
starts everything; in the later ones a tool has what it keeps: tp-runner and joblib their workers with the
model, the DataLoader's fork server what it has imported. Tools take turns within a round, and ratios are of
one round: other programs on the machine hit all alike. Run it as a program; ``--quick`` takes fewer pieces.
Peers that are not installed are left out; Ray Data needs pyarrow.
"""

import argparse
import functools
import importlib.util
import multiprocessing
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import torch
import tp_runner
import transformers

from tests.bench._results import Results

WORKERS, BATCH, LENGTH = 2, 32, 512


def pieces(n_items):
    """Return so many pieces of the standard library, as bytes of text: the tokens are the bytes."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        data = path.read_bytes()
        found += [data[i : i + LENGTH].ljust(LENGTH) for i in range(0, len(data), LENGTH)]
        if len(found) >= n_items:
            break
    return found[:n_items]


def load(device="cpu"):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    return transformers.BertModel(config).eval().to(device)


def predict(model, batch):
    """Return the mean hidden state of each piece: (batch, 64)."""
    tokens = torch.stack([torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in batch]).long()
    with torch.inference_mode():
        return model(tokens).last_hidden_state.mean(1)


@functools.cache
def model_of_process():
    return load()


def predict_here(batch):
    return predict(model_of_process(), batch)


class Predictor(tp_runner.OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.model = load(device)

    @staticmethod
    def producer_work(device, cfg, batch):
        return predict(cfg.model, batch)


@functools.cache
def runner():
    return Predictor(n_workers=WORKERS, batch=BATCH, threads=1, preload=[transformers.BertModel.__module__])


def ours(items):
    return runner().stream(items)


def data_loader(items):
    """Yield what a loop in this process makes of what the loader's workers hand over."""
    context = multiprocessing.get_context("forkserver")
    loader = torch.utils.data.DataLoader(
        items, batch_size=BATCH, num_workers=WORKERS, collate_fn=list, multiprocessing_context=context
    )
    model = load()
    for batch in loader:
        yield from predict(model, batch)


def joblib_loky(items):
    import joblib

    batches = [items[i : i + BATCH] for i in range(0, len(items), BATCH)]
    parallel = joblib.Parallel(WORKERS, return_as="generator")
    for results in parallel(joblib.delayed(predict_here)(batch) for batch in batches):
        yield from results


def ray_data(items):
    import ray.data

    if not ray.is_initialized():  # ray.data would join whatever cluster this machine has
        ray.init(address="local", log_to_driver=False, include_dashboard=False, logging_level="ERROR")

    class Predictor:
        def __init__(self):
            self.model = load()

        def __call__(self, batch):
            return {"out": predict(self.model, list(batch["item"])).numpy()}

    data = ray.data.from_items(items, override_num_blocks=WORKERS * 2)
    pool = ray.data.ActorPoolStrategy(size=WORKERS)
    for row in data.map_batches(Predictor, batch_size=BATCH, compute=pool).iter_rows():
        yield row["out"]


TOOLS = {"tp-runner": ours, "DataLoader and a loop": data_loader}
if importlib.util.find_spec("joblib"):
    TOOLS["joblib"] = joblib_loky
if importlib.util.find_spec("ray") and importlib.util.find_spec("pyarrow"):
    TOOLS["Ray Data"] = ray_data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    n_items, rounds = (640, 3) if quick else (6400, 5)
    items = pieces(n_items)
    expected = torch.stack([row for i in range(0, 64, BATCH) for row in predict_here(items[i : i + BATCH])])
    whole, first = {name: [] for name in TOOLS}, {name: [] for name in TOOLS}
    for _ in range(rounds):
        for name, tool in TOOLS.items():
            began = time.perf_counter()
            results = []
            for result in tool(items):
                if not results:
                    first[name].append(time.perf_counter() - began)
                results.append(torch.as_tensor(result))
            whole[name].append(time.perf_counter() - began)
            assert len(results) == n_items
            torch.testing.assert_close(torch.stack(results[:64]), expected)
    runner().close()
    with Results("runner-inference") as report:
        for when, some in (("first call", slice(1)), ("later calls", slice(1, None))):
            for title, figures in (("whole", whole), ("time to first result", first)):
                for name in TOOLS:
                    title_of = f"{n_items} pieces, {when}, {title}, {name}"
                    report.add(title_of, statistics.median(figures[name][some]), "s")
                    pairs = zip(figures[name][some], figures["tp-runner"][some], strict=True)
                    ratio = statistics.median(other / own for other, own in pairs)
                    report.add(f"{title_of}: ratio", ratio, "x the time")


if __name__ == "__main__":
    from tests.bench.runner import inference  # joblib's workers import functions from where they are

    sys.exit(inference.main())
