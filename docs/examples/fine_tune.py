"""Fine-tune a chat model of transformers with LoRA, and write an adapter that peft loads.

    python fine_tune.py --make small                      # a small model and chats, to try it with
    python fine_tune.py small --data small/chats.jsonl
    python fine_tune.py small --data small/chats.jsonl --pack 64   # chats in rows of 64 tokens, not padded
    tp launch -n 2 fine_tune.py small --data small/chats.jsonl

A line of the data is ``{"messages": [{"role": "user", "content": "7+5"}, {"role": "assistant", ...}]}``. The
answers are learned and nothing else: the tokenizer's chat template marks them by ``{% generation %}``. The
base stays frozen, so a checkpoint has what is trained, and the adapter is written in peft's own format.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tp_data import Loader, Packed, Stream
from tp_trainer import Callback, Checkpoints, Limits, LogOptions, SchedulerOptions, Trainer
from tp_trainer.callbacks import Throughput
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

IGNORED = -100
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}={% endif %}{% endfor %}"
)


class Chats:
    """Tokenized chats of a file of JSON lines: pairs of ids and labels."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.padding = tokenizer.pad_token_id
        self.rows = []
        for line in path.read_text().splitlines():
            chat = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learned = chat["input_ids"], chat["assistant_masks"]
            self.rows.append((ids, [i if mark else IGNORED for i, mark in zip(ids, learned, strict=True)]))

    def collate(self, rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        longest = max(len(ids) for ids, _ in rows)
        filled = [(len(ids), longest - len(ids), ids, labels) for ids, labels in rows]
        return {
            "input_ids": torch.tensor([ids + [self.padding] * rest for _, rest, ids, _ in filled]),
            "attention_mask": torch.tensor([[1] * used + [0] * rest for used, rest, _, _ in filled]),
            "labels": torch.tensor([labels + [IGNORED] * rest for _, rest, _, labels in filled]),
        }

    def packed(self, rows: list[tuple[list[int], list[int]]], length: int) -> tuple[Loader, int]:
        """Return a loader of chats in rows of `length` tokens, and about how many batches have all chats."""
        samples = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
        batcher = Packed(length, rows=8, padding=self.padding)
        batches = sum(len(ids) for ids, _ in rows) // (8 * length)
        return Loader(Stream(samples, shuffle=True, repeat=True), batcher), max(batches, 1)

    def tokens_per_sample(self) -> float:
        return sum(len(ids) for ids, _ in self.rows) / len(self.rows)


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    learned = batch["labels"][:, 1:]  # the model shifts its labels: the first one is never predicted
    output = model(**batch)
    right = (output.logits[:, :-1].argmax(2) == learned)[learned != IGNORED].float().mean()
    return {"loss": output.loss, "weight": (learned != IGNORED).sum(), "accuracy": right}


class Samples(Callback):
    """Prints answers after each epoch. All ranks generate, as layers may be split over them."""

    def __init__(self, tokenizer: Any, questions: list[str]) -> None:
        self.tokenizer, self.questions = tokenizer, questions

    def on_epoch_end(self, run: Any) -> None:
        for question in self.questions:
            said = answer(run.model, self.tokenizer, question, run.device)
            if run.is_main:
                print(f"epoch {run.epoch}: {question} -> {said}")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str, device: torch.device | str = "cpu") -> str:
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"].to(device)
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, nargs="?", help="a folder of from_pretrained")
    parser.add_argument("--data", type=Path, help="a file of JSON lines, a chat in each")
    parser.add_argument("--make", type=Path, help="write a small base and chats there, and end")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pack", type=int, help="the length of rows to pack chats into, instead of padding")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    options = parser.parse_args(arguments)
    if options.make is not None:
        make_base(options.make)
        return 0.0
    if options.base is None or options.data is None:
        parser.error("give the folder of a model and --data, or --make FOLDER")

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    chats = Chats(options.data, tokenizer)
    held_out = len(chats.rows) // 10
    loader: Any = DataLoader(chats.rows[held_out:], batch_size=50, shuffle=True, collate_fn=chats.collate)
    batches = len(loader)
    if options.pack is not None:
        loader, batches = chats.packed(chats.rows[held_out:], options.pack)
    val_loader = DataLoader(chats.rows[:held_out], batch_size=50, collate_fn=chats.collate)

    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(options.base), lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    steps = options.epochs * -(-batches // 2)
    schedule = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
    )

    with Trainer(seed=0, precision="bf16-mixed", accumulate=2) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            loader,
            step=step,
            epochs=options.epochs,
            limits=Limits(steps_per_epoch=batches),
            validation=val_loader,
            scheduler=SchedulerOptions(schedule, every="step"),
            clip_norm=1.0,
            callbacks=[
                Samples(tokenizer, ["3+4", "9+8"]),
                Throughput(tokens_per_sample=chats.tokens_per_sample()),
            ],
            log=LogOptions("jsonl"),
            checkpoint=Checkpoints(options.out / "checkpoints", weights="trainable", best="val_loss"),
            resume="auto",
        )
        trainer.export(model, options.out / "adapter", adapter=True)
        if trainer.is_main:
            whole = AutoModelForCausalLM.from_pretrained(options.base)
            loaded = PeftModel.from_pretrained(
                whole, options.out / "adapter"
            )  # as anyone loads it, without tp
            print("loaded again:", answer(loaded, tokenizer, "3+4"))
    return history[-1].val["accuracy"]


def make_base(folder: Path) -> None:
    """Write a small Llama that knows differences, a tokenizer of bytes, and chats about sums."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({"<end>": 0} | {c: i for i, c in enumerate(alphabet, 1)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **ends)
    tokenizer.save_pretrained(folder)

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "vocab_size": len(tokenizer),
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(0)
    for _ in range(300):
        texts = [
            f"{a}-{b}={a - b}<end>" for a, b in ((draw.randrange(20), draw.randrange(20)) for _ in range(64))
        ]
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)

    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(2000):
            a, b = draw.randrange(10), draw.randrange(10)
            said = {"user": f"{a}+{b}", "assistant": str(a + b)}
            messages = [{"role": role, "content": content} for role, content in said.items()]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
