"""Expert parallelism of transformers 5.5.4, before its pull request 45473: five faults, then none.

    python -m venv old && old/bin/pip install torch transformers==5.5.4 tp-verify
    old/bin/tp verify experts.py:cases

Loss and logits are wrong in silence. Each case has all faults but one mended, the last all of them. The pull
request is of the first three:

- ``plan``: weights are loaded by the tensor-parallel plan, which GPT-OSS has not; hooks are expert-parallel.
- ``router``: scores are cut to this rank's experts, and no longer stand beside the indices of experts.
- ``grouped``: tokens of other ranks' experts get whatever is in memory.
- ``gradient``: the router's gradient is not summed over ranks. It was not after the pull request, either.
- ``count``: the number of a rank's experts is divided by the ranks again with each tensor that is loaded.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
from tp_verify import Strategy
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, logging
from transformers.distributed import DistributedConfig
from transformers.integrations import tensor_parallel as styles

SIZES = {"vocab_size": 48, "hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
PLAN = {
    "layers.*.mlp.gate": "ep_router",
    "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "layers.*.mlp.experts.down_proj": "grouped_gemm",
    "layers.*.mlp.experts": "moe_tp_experts",
}


def build():
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **LAYERS, **EXPERTS, attn_implementation="eager"))
    model.set_experts_implementation("batched_mm")
    return model


def build_gpt_oss():
    options = {"sliding_window": 4, "num_local_experts": 4, "intermediate_size": 16}
    config = GptOssConfig(**SIZES, **LAYERS, **EXPERTS, **options, attn_implementation="eager")
    model = GptOssForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def step(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


class Slices(styles.GroupedGemmParallel):
    """This rank's experts. The release takes them by the number of the GPU, and here is none."""

    def shard_tensor(self, param, tensor_idx=None, device=None, dtype=None):  # noqa: ARG002 - theirs
        count = self.empty_param.shape[0] // dist.get_world_size()
        if tensor_idx is None:
            return param[dist.get_rank() * count : (dist.get_rank() + 1) * count].to(dtype)
        return param[:].to(dtype) if tensor_idx // count == dist.get_rank() else None


class Counted(Slices):
    """They are counted once, and not divided by the ranks again with each of their tensors."""

    def update_module_attributes(self, module):
        module.num_experts = self.empty_param.shape[0] // dist.get_world_size()


class PairedRouter(styles.RouterParallel):
    """Scores stay beside the indices of their experts, and are 0 for experts of other ranks."""

    sums = True

    def _prepare_output_fn(self, mod, outputs, device_mesh):
        logits, scores, _ = outputs
        _, _, local = super()._prepare_output_fn(mod, outputs, device_mesh)
        if self.sums:
            scores = styles.all_reduce_backward(scores, device_mesh)
        return logits, scores.masked_fill(local == mod.num_experts // device_mesh.size(), 0.0), local


class Alone(PairedRouter):
    """So are they since the pull request; each rank's router gets the gradient of its own experts."""

    sums = False


class Experts(Strategy):
    """A model whose experts are divided over ranks, with one fault."""

    data = "whole"

    def __init__(self, fault):
        super().__init__(name=f"experts of transformers, {fault}")
        self.fault = fault

    def parallelize(self, model):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.simplefilter("ignore")
        Qwen3MoeConfig.base_model_ep_plan = PLAN
        styles.ALL_PARALLEL_STYLES["grouped_gemm"] = Slices() if self.fault == "count" else Counted()
        routers = {"router": styles.RouterParallel, "gradient": Alone}
        styles.ALL_PARALLEL_STYLES["ep_router"] = routers.get(self.fault, PairedRouter)()
        as_released = {
            "tp_plan": "auto",
            "distributed_config": DistributedConfig(enable_expert_parallel=True),
        }
        by_hand = {"tp_plan": {f"model.{name}": style for name, style in PLAN.items()}}
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        model.save_pretrained(folder[0])
        dist.barrier()
        return type(model).from_pretrained(
            folder[0],
            dtype=model.dtype,
            attn_implementation="eager",
            experts_implementation="grouped_mm" if self.fault == "grouped" else "batched_mm",
            **(as_released if self.fault == "plan" else by_hand),
        )


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(48, (2, 6), generator=generator) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "dtype": torch.float32}
    more = [
        case | {"parallel": Experts(fault)} for fault in ("router", "grouped", "gradient", "count", "none")
    ]
    return [case | {"parallel": Experts("plan"), "build": build_gpt_oss}, *more]
