"""Adapters of peft under FSDP2 of Accelerate 1.14.0, before its pull request 4206: a checkpoint loses them.

    python -m venv old && old/bin/pip install torch transformers peft accelerate==1.14.0 tp-verify
    old/bin/tp verify adapters.py:cases

Accelerate writes the first rank's slice of each adapter alone, and loads it on the first rank alone.
"""

import torch
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from peft import LoraConfig, get_peft_model
from tp_verify import strategies
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


def build():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def step(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def plugin():
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="FULL_STATE_DICT"
        )
    }


class Adapters(strategies.Accelerate):
    """Accelerate, with a checkpoint of the adapters alone, as transformers' Trainer writes it."""

    def save(self, model, optimizer, folder):
        own = self._accelerator
        save_fsdp_model(own.state.fsdp_plugin, own, model, folder, adapter_only=True)
        save_fsdp_optimizer(own.state.fsdp_plugin, own, optimizer, model, folder)

    def load(self, model, optimizer, folder):
        own = self._accelerator
        load_fsdp_model(own.state.fsdp_plugin, own, model, folder, adapter_only=True)
        load_fsdp_optimizer(own.state.fsdp_plugin, own, optimizer, model, folder)


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(48, (2, 6), generator=generator)]
    return {
        "build": build,
        "batches": batches,
        "step": step,
        "parallel": Adapters(plugin),
        "dtype": torch.float32,
        "reload_on": 2,
    }
