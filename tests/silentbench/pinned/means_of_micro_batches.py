"""The Trainer adds up means of micro-batches: a token of a short one weighs more than that of a long one."""

import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from tp_verify import Strategy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def build():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


def step(model, batch):
    return {"loss": model(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


class InOrder(Trainer):
    def _get_train_sampler(self):
        return SequentialSampler(self.train_dataset)


class Fitted(Strategy):
    """Each step is a training of one step, in which each rank accumulates a long row and a short one."""

    name, data = "Trainer", "whole"
    reorders = True

    def prepare(self, model, make):
        self.optimizer, self.model = make(model), model
        self.optimizer.register_step_pre_hook(self.keep_gradients)  # the Trainer drops them after its step
        return model, self.optimizer

    def keep_gradients(self, *_):
        self.gradients = {p: p.grad.clone() for p in self.model.parameters()}

    def gradient(self, parameter):
        return self.gradients[parameter]

    def backward(self, model, step, parts):
        (batch,) = parts
        rows = [{key: value[row] for key, value in batch.items()} for row in range(4)]
        with tempfile.TemporaryDirectory() as folder:
            options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
            options |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "disable_tqdm": True}
            options |= {"report_to": [], "use_cpu": True, "save_strategy": "no"}
            arguments = TrainingArguments(folder, **options)
            trainer = InOrder(model, arguments, train_dataset=rows, optimizers=(self.optimizer, None))
            mean = torch.tensor(trainer.train().training_loss)
        dist.all_reduce(mean)  # as its log has it
        return mean / dist.get_world_size()

    def update(self, model, optimizer):
        """Leave the step to the Trainer, which has made it."""


def cases():
    ids = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100  # no loss is of it, and the right version would count it
    labels[2:, 3:] = -100
    batches = [{"input_ids": ids, "labels": labels}]
    case = {"build": build, "batches": batches, "step": step, "parallel": Fitted()}
    return case | {"dtype": torch.float32, "vary": False}
