"""Train a Llama on long documents, packed into rows, with each row split over several processes.

    python long_documents.py --tokens 512
    tp launch -n 2 long_documents.py --tokens 1024 --context 2
    tp launch -n 8 long_documents.py --base FOLDER --context 8 --weights fsdp --precision bf16-mixed

The documents are the standard library's sources, as bytes. Without ``--base`` the model is a small one.
Positions begin at 0 in each document, so that transformers lets a token attend to its own document alone.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tp_trainer import Checkpoints, Trainer, checkpoint_activations
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

IGNORED = -100


def pack(paths: Sequence[Path], tokens: int) -> list[dict[str, Tensor]]:
    """Return rows of a number of tokens; a document goes on in the next row where one is full."""
    rows, ids, positions, labels = [], [], [], []
    for path in paths:
        document = list(path.read_bytes())
        ids += document
        positions += range(len(document))
        labels += [IGNORED, *document[1:]]  # no document is predicted from the one before it
    for at in range(0, len(ids) - tokens + 1, tokens):
        part = slice(at, at + tokens)
        first = positions[at]  # transformers counts documents by positions, which begin anew in a row
        own = [p - first if p >= first and p - first == i else p for i, p in enumerate(positions[part])]
        row = {"input_ids": ids[part], "position_ids": own, "labels": [IGNORED, *labels[part][1:]]}
        rows.append({name: torch.tensor(values) for name, values in row.items()})
    return rows


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # a mean over the labels that count in whole rows, whatever part is here


def make_model(base: Path | None) -> nn.Module:
    if base is not None:
        return AutoModelForCausalLM.from_pretrained(base, use_cache=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes))


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="a folder of from_pretrained")
    parser.add_argument("--tokens", type=int, default=65536, help="of a row")
    parser.add_argument("--context", type=int, default=1, help="processes that share each row")
    parser.add_argument("--weights", default="whole", help="or the backend that holds them, such as fsdp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("long"))
    options = parser.parse_args(arguments)

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:12]
    rows = pack(sources, options.tokens)[:40]
    train, held_out = rows[4:], rows[:4]
    model = make_model(options.base)
    checkpoint_activations(model)  # what is left of a layer is its input, of this rank's tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split = {"context": options.context, "weights": options.weights}
    with Trainer(
        backend="context" if options.context > 1 else "auto",
        options={"context": split} if options.context > 1 else {},
        precision=options.precision,
        seed=0,
    ) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            DataLoader(train, batch_size=2, shuffle=True),
            step=step,
            validation=DataLoader(held_out, batch_size=2),
            epochs=options.epochs,
            clip_norm=1.0,
            checkpoint=Checkpoints(options.out / "checkpoints"),
            resume="auto",
        )
        trainer.export(model, options.out / "model.safetensors")
        if trainer.is_main:
            print(f"{trainer.selection.chosen.name}: validation loss {history[-1].val['loss']:.3f}")
    return history[-1].val["loss"]


if __name__ == "__main__":
    main()
