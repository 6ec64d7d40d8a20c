"""transformers' Trainer, which saves every five steps, and `resume_from_checkpoint`.

tp verify --resume -- python transformers_fit.py {folder}
tp verify --resume --ranks 2 -- torchrun --nproc-per-node {ranks} transformers_fit.py {folder}
"""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

BATCH = 8

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--dropout", type=float, default=0.1)
options = parser.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))

set_seed(0)
tokens = torch.randint(40, (32, 10))
sizes = {"n_positions": 10, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=40, **sizes, **rates)),
    TrainingArguments(
        options.folder,
        num_train_epochs=3,
        per_device_train_batch_size=BATCH // ranks,
        learning_rate=1e-2,
        save_steps=5,
        seed=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(options.folder))
