"""Fine-tune a causal language model of transformers on answers alone, with a loss that is a mean over tokens.

    python finetune.py
    tp launch -n 2 finetune.py
    python finetune.py --model my-model-folder        # any causal language model on this machine

Prompts and padding are not learned: their labels are -100. Texts have different lengths, so that batches, and
the ranks' shares of one, have different numbers of tokens that count; the step says how many. Without
``--model`` a small GPT-2 is made, whose tokens are bytes; the texts are sums, with "12+7=" as a prompt.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tp_trainer import Checkpoints, SchedulerOptions, Trainer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

END, IGNORED = 0, -100


def make_model() -> nn.Module:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=END, eos_token_id=END, **sizes))


def make_texts(count: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers, as bytes."""
    draw = random.Random(0)
    pairs = [(draw.randrange(20), draw.randrange(20)) for _ in range(count)]
    return [(list(f"{a}+{b}=".encode()), [*str(a + b).encode(), END]) for a, b in pairs]


def collate(texts: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    batch = {"input_ids": END, "attention_mask": 0, "labels": IGNORED}
    tensors = {name: torch.full((len(texts), longest), filling) for name, filling in batch.items()}
    for row, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        tensors["input_ids"][row, :end] = torch.tensor(prompt + answer)
        tensors["attention_mask"][row, :end] = 1
        tensors["labels"][row, len(prompt) : end] = torch.tensor(answer)
    return tensors


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    counted = (
        batch["labels"][:, 1:] != IGNORED
    )  # the model shifts its labels: the first one is never predicted
    output = model(**batch)
    right = (output.logits[:, :-1].argmax(2) == batch["labels"][:, 1:])[counted].float().mean()
    return {"loss": output.loss, "weight": counted.sum(), "accuracy": right}


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder with a model of transformers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("finetuned"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = make_model() if options.model is None else AutoModelForCausalLM.from_pretrained(options.model)
    texts = make_texts(2000)
    loader = DataLoader(texts[200:], batch_size=50, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(texts[:200], batch_size=50, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)

    with Trainer(seed=0, accumulate=2) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            loader,
            step=step,
            epochs=options.epochs,
            validation=val_loader,
            scheduler=SchedulerOptions(warmup, every="step"),
            clip_norm=1.0,
            checkpoint=Checkpoints(options.folder / "checkpoints", best="val_loss"),
            resume="auto",
        )
        trainer.export(model, options.folder / "model.safetensors")
        accuracy = history[-1].val["accuracy"]
        if trainer.is_main:
            model.config.save_pretrained(options.folder)  # now from_pretrained(folder) loads it
            print(f"loss {history[-1].val['loss']:.4f}, {accuracy:.2f} of the answers' tokens are right")
    return accuracy


if __name__ == "__main__":
    main()
