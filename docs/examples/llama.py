"""Train a Llama-like model of transformers on Python's standard library, whole, sharded, split, or both.

    python docs/examples/llama.py
    TP_BACKEND=fsdp tp launch -n 2 docs/examples/llama.py
    tp launch -n 2 docs/examples/llama.py --tensor 2
    tp launch -n 4 docs/examples/llama.py --tensor 2

With ``--tensor 2`` neighboring ranks hold each layer together, split by the plan that the model brings; the
groups of two share each batch, and what a rank has of the model is sharded once more over the groups. It
predicts bytes, so there is nothing to download. The losses are the same everywhere. Interrupt it (Ctrl-C,
SIGTERM) and start it again, in another of these ways too: it goes on after the step at which it was.
"""

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Limits, Trainer
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64


def make_model() -> nn.Module:
    """Return a Llama of 32 + 2 x 27 thousand parameters; with other numbers it has billions."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def splitting() -> Callable[[], nn.Module]:
    """Return what makes the model with this rank's part of each layer."""
    import tp_shard as ts

    with torch.device("meta"):  # a plan needs no values
        model = make_model()
    plan = ts.plans.from_hf(model, verbose=False)
    return lambda: ts.parallelize(make_model(), plan)


def read_bytes(limit: int = 400_000) -> Tensor:
    """Return the beginning of the standard library's own modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def step(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (tokens,) = batch  # (batch, LENGTH)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of an epoch; all of the text by default")
    parser.add_argument("--tensor", type=int, default=1, help="how many ranks hold each layer together")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for checkpoints and weights")
    args = parser.parse_args(arguments)

    windows = read_bytes().unfold(0, LENGTH, LENGTH)
    held_out = len(windows) // 20
    options = {}
    if args.tensor > 1:
        import tp_shard as ts

        ts.distributed.init_process_group(args.tensor)
        options = {"shard": ts.ShardOptions(data="fsdp")}
    with Trainer(seed=0, accumulate=2, options=options) as trainer:
        make = splitting() if args.tensor > 1 else make_model
        torch.manual_seed(0)
        # Where ranks have shards alone, the whole model is in the memory of none of them.
        model = trainer.build(make)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        train = DataLoader(TensorDataset(windows[:-held_out]), batch_size=16, shuffle=True, drop_last=True)
        history = trainer.fit(
            model,
            optimizer,
            train,
            step=step,
            epochs=args.epochs,
            limits=Limits(steps_per_epoch=args.steps or len(train)),
            validation=DataLoader(TensorDataset(windows[-held_out:][:99]), batch_size=32),
            clip_norm=1.0,
            checkpoint=Checkpoints(args.out / "checkpoints", every_steps=2),
            resume="auto",
        )
        trainer.export(model, args.out / "llama.safetensors")
        if trainer.is_main:
            losses = " ".join(f"{record.train['loss']:.6f}/{record.val['loss']:.6f}" for record in history)
            print(f"backend={trainer.selection.chosen.name} losses={losses}", flush=True)


if __name__ == "__main__":
    main()
