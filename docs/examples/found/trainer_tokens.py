"""transformers 5.24's Trainer with DDP, accumulated and clipped, where ranks have uneven tokens.

    pip install torch transformers accelerate tp-verify
    tp verify trainer_tokens.py:cases

It divides by the tokens of all ranks. With ``average_tokens_across_devices=False`` each rank divides by its
own, and the mean over ranks is another loss. The lines are those of its loop, which has no function for a
step.
"""

import tempfile
from contextlib import nullcontext

import torch
from tp_verify import Strategy


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=2, **sizes))


def step(model, batch):
    return {"loss": model(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


class Trained(Strategy):
    def __init__(self, average):
        super().__init__(data="rows", name=f"Trainer, average_tokens_across_devices={average}")
        self.average = average

    def prepare(self, model, make):
        from transformers import Trainer, TrainingArguments

        options = {"average_tokens_across_devices": self.average, "use_cpu": True, "report_to": []}
        arguments = TrainingArguments(tempfile.mkdtemp(), gradient_accumulation_steps=2, **options)
        self.trainer = Trainer(model, arguments)
        return self.trainer.accelerator.prepare(model, make(model))

    def backward(self, model, step, parts):  # noqa: ARG002 - its signature
        trainer, total = self.trainer, torch.zeros(())
        batches, tokens = trainer.get_batch_samples(iter(parts), len(parts), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(batches)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            trainer.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else trainer.accelerator.no_sync(model):
                total = total + trainer.training_step(model, dict(batch), tokens)
        return total


def cases():
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:3, :4] = -100
    case = {"build": build, "batches": [{"input_ids": tokens, "labels": labels}], "step": step}
    case |= {"micro": 2, "max_norm": 0.5}
    return [case | {"parallel": Trained(average)} for average in (True, False)]
