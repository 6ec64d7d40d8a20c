"""torchtitan 0.3's plans for its Llama: FSDP, then tensor parallelism, on gloo.

    pip install torch torchtitan tp-verify
    tp verify titan_llama.py:cases

torchtitan imports kernels of experts, which need Triton. PyTorch's builds for the CPU have none: a stand-in
takes their place. Llama does not use them. Attention is torch's own function, without documents' masks.
"""

import sys
from functools import partial
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from tp_verify import Strategy

sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402 - after the stand-in
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

parallel_dims.device_type = "cpu"  # where there is no accelerator, it is CUDA

WORDS, WIDTH, HEADS = 64, 32, 4
NORMAL = {"weight": partial(torch.nn.init.normal_, std=0.1)}


def norm():
    return RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": torch.nn.init.ones_})


def block():
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=WIDTH,
            n_heads=HEADS,
            n_kv_heads=2,
            wqkv_param_init=NORMAL,
            wo_param_init=NORMAL,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=32),
        ),
        feed_forward=make_ffn_config(dim=WIDTH, hidden_dim=48, w1_param_init=NORMAL, w2w3_param_init=NORMAL),
    )


def build():
    config = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        layers=[block() for _ in range(2)],
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=NORMAL),
        norm=norm(),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=NORMAL),
    )
    set_llama3_sharding_config(config, enable_sp=True)
    model = config.build()
    model.init_states()
    return model


def step(model, batch):
    labels = batch[:, 1:].contiguous()
    return cross_entropy_loss(model(batch)[:, :-1], labels) / labels.numel()


class Titan(Strategy):
    """torchtitan's ``parallelize_llama``. Its FSDP sums gradients: its trainer divides by all tokens."""

    def __init__(self, tensor=1):
        super().__init__(name=f"torchtitan, tensor={tensor}", data="whole" if tensor > 1 else "rows")
        self.tensor = tensor

    def parallelize(self, model):
        set_spmd_backend("partial_dtensor")
        sizes = ParallelismConfig(tensor_parallel_degree=self.tensor, spmd_backend="partial_dtensor")
        parallel = parallelize_llama(
            model,
            parallel_dims=ParallelDims.from_config(sizes, dist.get_world_size()),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=sizes,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        for module in parallel.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other without a division
        return parallel

    def backward(self, model, step, parts):
        loss = super().backward(model, step, parts)
        if self.data == "rows":
            for parameter in model.parameters():
                parameter.grad.div_(dist.get_world_size())
        return loss


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(WORDS, (4, 8), generator=generator) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "dtype": torch.float32, "max_norm": 0.5}
    return [case | {"parallel": Titan(tensor)} for tensor in (1, 2)]
