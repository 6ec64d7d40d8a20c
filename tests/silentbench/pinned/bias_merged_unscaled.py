"""PEFT merges an adapter's bias without its scale: the merged model is another one."""

import torch
from peft import LoraConfig, get_peft_model


def shown():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(2, 2))
    config = LoraConfig(target_modules=["0"], r=2, lora_alpha=8, lora_bias=True, init_lora_weights=False)
    model = get_peft_model(base, config)
    torch.nn.init.ones_(model.base_model.model[0].lora_B["default"].bias)
    rows = torch.ones(1, 2)
    with torch.no_grad():
        before = model(rows)
        after = model.merge_and_unload()(rows)
    return [round(value, 3) for value in (after - before).flatten().tolist()]
