"""A small decoder, its step and its batches, and strategies written by hand, with places for faults."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy
from tp_verify.strategies import clip_mixed

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 24, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):  # (batch, length, width)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.ones(()))
        self.start = 0
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        numbers = torch.arange(self.start, self.start + tokens.size(1))
        x = self.embed(tokens) + self.places(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    return Decoder()


def build_tied():
    return Decoder(tied=True)


def build_stages():
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def step(model, batch):
    loss = loss_of(model(batch["tokens"]), batch["labels"])
    return {"loss": loss, "weight": (batch["labels"] != -100).sum()}


def make_batch(rows, seed, *, uneven=True):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    if uneven:
        labels[: rows // 2, 2:] = -100
    return {"tokens": tokens, "labels": labels}


# Verification makes a third.
UNEVEN = [make_batch(8, 1), make_batch(6, 2)]
EVEN = [make_batch(8, n, uneven=False) for n in range(2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# -- Collectives with gradients -------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """Forward nothing, backward an all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class Reduce(torch.autograd.Function):
    """Forward an all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Gather(torch.autograd.Function):
    """Forward an all-gather along the places, backward a reduce-scatter; or a slice, which is a fault."""

    @staticmethod
    def forward(ctx, x, dim, sums):
        ctx.dim, ctx.sums = dim, sums
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if ctx.sums:
            dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None, None


# -- Tensor parallelism by hand -------------------------------------------------------------------


class Column(nn.Module):
    def __init__(self, whole, fault):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[rank].clone())
        self.fault = fault

    def forward(self, x):
        x = x if self.fault == "column backward" else Copy.apply(x)
        y = F.linear(x, self.weight, self.bias)
        return y * 2 if self.fault == "column twice" and dist.get_rank() else y


class Row(nn.Module):
    def __init__(self, whole, fault):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        place = ranks - 1 - rank if fault == "row slices swapped" else rank
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[place].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.fault = fault

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias if self.fault == "bias on every rank" else None)
        if self.fault != "row forward":
            y = Copy.apply(Reduce.apply(y)) if self.fault == "row backward twice" else Reduce.apply(y)
        if self.fault == "row mean":
            y = y / dist.get_world_size()
        return y if self.fault == "bias on every rank" else y + self.bias


class VocabularyEmbedding(nn.Module):
    def __init__(self, whole, fault):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.first, self.fault = rank * self.weight.size(0), fault

    def forward(self, tokens):
        local = tokens - self.first
        outside = (local < 0) | (local >= self.weight.size(0))
        found = F.embedding(local.clamp(0, self.weight.size(0) - 1), self.weight)
        if self.fault != "vocabulary mask":
            found = found.masked_fill(outside[..., None], 0.0)
        return Reduce.apply(found)


class ByHand(Strategy):
    """Megatron's layers by hand; ``fault`` names what is wrong, and ``at`` the module where it is."""

    name, data = "tensor parallel by hand", "whole"

    def __init__(self, fault="", at="blocks.1.mlp"):
        super().__init__()
        self.fault, self.at = fault, at

    def parallelize(self, model):
        ranks = dist.get_world_size()
        kinds = {"up": Column, "q": Column, "k": Column, "v": Column, "down": Row, "o": Row}
        for path, module in list(model.named_modules()):
            fault = self.fault if path.startswith(self.at) else ""
            parent, _, name = path.rpartition(".")
            if isinstance(module, nn.Linear) and name in kinds:
                setattr(model.get_submodule(parent), name, kinds[name](module, fault))
            if isinstance(module, Attention):
                module.heads //= 1 if fault == "heads not divided" else ranks
        model.embed = VocabularyEmbedding(model.embed, self.fault if self.at == "embed" else "")
        self.hook(model)
        return model

    def hook(self, model):
        if self.fault == "norm on a slice":
            norm = model.get_submodule(self.at)
            norm.register_forward_pre_hook(lambda m, a: (a[0] + 0.01 * dist.get_rank() * a[0].square(),))
        if self.fault == "gradient of a norm left out":
            model.get_submodule(self.at).weight.register_hook(lambda g: g / dist.get_world_size())
        if self.fault == "draws of one rank":
            module = model.get_submodule(self.at)
            module.register_forward_hook(lambda m, a, y: y * (1 + 1e-3 * dist.get_rank()))

    def clip(self, model, max_norm):
        split = ("up", "q.", "k.", "v.", "down.weight", "o.weight", "embed")
        total = torch.zeros((), dtype=torch.float64)
        for name, p in model.named_parameters():
            own = p.grad.double().square().sum()
            is_split = any(s in name for s in split)
            if self.fault == "norm counts copies" or (is_split and self.fault != "norm of one rank"):
                dist.all_reduce(own)
            total += own
        norm = total.sqrt()
        for p in model.parameters():
            p.grad.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
        return norm


# -- Context parallelism by hand ------------------------------------------------------------------


class Context(Strategy):
    """Each rank has half of the places; keys and values are gathered."""

    name, data = "context by hand", "whole"

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault

    def share(self, batch):
        half = LENGTH // dist.get_world_size()
        first = dist.get_rank() * half
        return {key: value[:, first : first + half] for key, value in batch.items()}

    def parallelize(self, model):
        half = LENGTH // dist.get_world_size()
        first = dist.get_rank() * half
        model.start = 0 if self.fault == "positions" else first
        for number, block in enumerate(model.blocks):
            fault = self.fault if number == 1 else ""

            def attend(q, k, v, fault=fault):
                k = Gather.apply(k, 2, fault != "gradient of keys")
                v = Gather.apply(v, 2, fault != "gradient of values")
                if fault == "own keys alone":
                    k, v = (t[:, :, first : first + half] for t in (k, v))
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                places = torch.arange(half) + (0 if fault == "mask begins at 0" else first)
                mask = torch.arange(k.size(2)) <= places[:, None]
                if fault == "mask is off by one":
                    mask = torch.arange(k.size(2)) < places[:, None].clamp(min=1)
                if fault == "halves merged without weights":
                    parts = [
                        F.scaled_dot_product_attention(q, kk, vv, attn_mask=mm)
                        for kk, vv, mm in zip(k.chunk(2, 2), v.chunk(2, 2), mask.chunk(2, 1), strict=True)
                    ]
                    return sum(part.nan_to_num() for part in parts) / (2 if dist.get_rank() else 1)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

            block.attention.attend = attend
        self.parameters = list(model.parameters())
        return model

    def backward(self, model, step, parts):
        (part,) = parts
        if self.fault == "last label lost":
            part = {**part, "labels": part["labels"].clone()}
            part["labels"][:, -1] = -100
        output = step(model, part)
        weight = output["weight"].double()
        total = weight.clone()
        dist.all_reduce(total)
        factor = 1 / dist.get_world_size() if self.fault == "means of slices" else float(weight / total)
        (output["loss"].nan_to_num() * factor).backward()
        for name, p in model.named_parameters():
            if not (self.fault == "one weight not summed" and name == "blocks.0.mlp.up.weight"):
                dist.all_reduce(p.grad)
        return output["loss"].detach()


class Mixed(Strategy):
    """`fully_shard` over two ranks, of what a plan has split over two others."""

    name, data = "two dimensions", "whole"

    def parallelize(self, model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
        plan = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        return model

    def clip(self, model, max_norm):
        return clip_mixed(model, max_norm)
