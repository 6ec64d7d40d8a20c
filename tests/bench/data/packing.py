"""Packed rows and token budgets beside padding and TRL's packing: python -m tests.bench.data.packing

Documents are the top-level functions and classes of the standard library, as Python's own tokenizer cuts
them: a real distribution of lengths, of which few are long. All loaders have the same documents, cut at the
same length, in batches of about as many tokens. Fill is the part of a batch that is tokens. A small Llama
trains on each of them in turns.
"""

import ast
import io
import random
import statistics
import sysconfig
import time
import tokenize
import zlib
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tp_data import Loader, Packed, RowForm, Stream, TokenBudget

from tests.bench._results import Results

LENGTH, ROWS, VOCABULARY = 1024, 4, 1000
BATCH = LENGTH * ROWS
SAMPLES = 16  # of the plain loader: about as many tokens, with padding
STEPS, ROUNDS = 3, 3


def documents(most=12_000):
    """Return the tokens of top-level functions and classes, in a mixed order."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text("utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            words = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline)]
            ids = [1 + zlib.crc32(w.encode()) % (VOCABULARY - 1) for w in words]
            found += [{"input_ids": ids[i : i + LENGTH]} for i in range(0, len(ids), LENGTH)]
    random.Random(0).shuffle(found)
    return found[:most]


def padded(samples):
    """Yield batches as a plain loader makes them: so many samples each, padded to the longest."""
    for i in range(0, len(samples) - SAMPLES + 1, SAMPLES):
        chosen = [torch.tensor(s["input_ids"]) for s in samples[i : i + SAMPLES]]
        lengths = torch.tensor([len(ids) for ids in chosen])
        ids = pad_sequence(chosen, batch_first=True)
        mask = (torch.arange(ids.size(1)) < lengths[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}, int(lengths.sum())


def packed_by_trl(samples):
    """Yield batches of the rows that TRL's packing makes of the whole data, ahead of training."""
    from datasets import Dataset
    from trl import pack_dataset

    rows = pack_dataset(Dataset.from_list(samples), LENGTH, "bfd", {"batch_size": len(samples)})[:]
    ids, lengths = rows["input_ids"], rows["seq_lengths"]
    order = list(range(len(ids)))
    random.Random(0).shuffle(order)
    form = RowForm()
    for i in range(0, len(order) - ROWS + 1, ROWS):
        made = []
        for row in order[i : i + ROWS]:
            ends = torch.tensor([0, *lengths[row]]).cumsum(0).tolist()
            made.append([({"input_ids": ids[row]}, a, b) for a, b in pairwise(ends)])
        batch = form.make(made, LENGTH)
        yield dict(batch), batch.tokens


def ours(samples, batcher):
    for batch in Loader(Stream(samples), batcher):
        values = dict(batch)
        if "labels" not in values:
            values["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        yield values, batch.tokens


def loaders(samples):
    found = {
        "padded": lambda: padded(samples),
        "TokenBudget": lambda: ours(samples, TokenBudget(BATCH)),
        "Packed, best-fit": lambda: ours(samples, Packed(LENGTH, ROWS)),
        "Packed, concat": lambda: ours(samples, Packed(LENGTH, ROWS, how="concat")),
    }
    try:
        import trl  # noqa: F401
    except ImportError:
        return found
    return found | {"TRL, bfd": lambda: packed_by_trl(samples)}


def fill(batches):
    """Return the part of all batches but the last two that is tokens: an end has less."""
    sizes = [(tokens, values["input_ids"].numel()) for values, tokens in batches][:-2]
    return sum(t for t, _ in sizes) / sum(n for _, n in sizes)


def spread(samples, ranks):
    """Return the most tokens of a rank in a step, with padding, less the fewest, relative to their mean."""
    batcher, far, mean = TokenBudget(BATCH * ranks), 0.0, 0.0
    items = iter(Loader(Stream(samples), batcher)._items(range(len(samples)), 0))
    batcher.start(None, lambda _: [])
    while (rows := batcher.next_batch(items)) is not None:
        parts = batcher.split(rows, ranks)
        loads = [len(part) * max(row.pieces[0].stop or 0 for row in part) if part else 0 for part in parts]
        far, mean = far + max(loads) - min(loads), mean + sum(loads) / ranks
    return far / mean


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**heads, **sizes, use_cache=False))


def tokens_per_second(batches):
    """Return how many tokens, without padding, a second of one core trains on; loading is part of it."""
    torch.set_num_threads(1)  # CPU time: other programs disturb it less
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source, total = iter(batches), 0
    for step in range(STEPS + 1):
        if step == 1:
            begin = time.process_time()
        values, tokens = next(source)
        model(**values).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += tokens if step else 0
    return total / (time.process_time() - begin)


def run(results):
    samples = documents()
    lengths = sorted(len(s["input_ids"]) for s in samples)
    results.add("documents", len(samples), "")
    results.add("median length", statistics.median(lengths), "tokens")
    results.add("mean length", statistics.mean(lengths), "tokens")
    made = loaders(samples)
    for name, make in made.items():
        results.add(f"fill: {name}", 100 * fill(make()), "%")
    for ranks in (2, 3, 4, 6):
        results.add(f"spread: {ranks} ranks", 100 * spread(samples, ranks), "%")
    found = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, make in made.items():
            found[name].append(tokens_per_second(make()))
    for name, values in found.items():
        ratio = statistics.median(v / p for v, p in zip(values, found["padded"], strict=True))
        results.add(f"tokens trained: {name}", statistics.median(values), "per second")
        results.add(f"ratio: {name}", ratio, "x padded")


if __name__ == "__main__":
    with Results("data-packing") as results:
        run(results)
