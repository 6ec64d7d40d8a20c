"""The Trainer adds up means of micro-batches: a token of a short one weighs more than that of a long one."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def trained(rows, size, accumulated):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        options |= {"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "max_grad_norm": 0.0}
        options |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "lr_scheduler_type": "constant"}
        Trainer(model, TrainingArguments(folder, disable_tqdm=True, **options), train_dataset=rows).train()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def shown():
    ids = torch.arange(1, 9)
    long, short = ids.clone(), ids.clone()
    short[3:] = -100
    rows = [{"input_ids": ids, "labels": long}, {"input_ids": ids, "labels": short}]
    apart = trained(rows, 1, 2) - trained(rows, 2, 1)
    return "as one batch" if apart.abs().max() < 1e-5 else "otherwise"
