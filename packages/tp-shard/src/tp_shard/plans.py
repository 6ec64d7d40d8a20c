"""Plans for models that were not written for this package: each is proven before it is returned."""

import sys
from typing import Any, NoReturn

from torch import nn
from tp_core.arguments import explain_arguments
from tp_core.errors import ConfigError, ModelError

from tp_shard._groups._group import GroupLike, as_group
from tp_shard._plans._adapters import with_copies
from tp_shard._plans._parallelize import describe, reasons
from tp_shard._plans._styles import Style, Vocab
from tp_shard._search._prove import Proof, prove, restrict, translate
from tp_shard._search._variants import vocabulary, with_sequences
from tp_shard._verify._examples import example_call, first_line
from tp_shard._verify._report import as_call, check_whole

__all__ = ["auto", "from_hf"]


def __getattr__(name: str) -> NoReturn:
    """Refuse the name of a plan for one family of models: plans are made from the model itself."""
    msg = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        msg += "; a plan is made from the model: write plans.auto(model, batch), or plans.from_hf(model)"
    raise AttributeError(msg, name=name, obj=sys.modules[__name__])


@explain_arguments("auto(model, batch)")
def auto(
    model: nn.Module,
    batch: Any = None,
    *,
    parallel_loss: bool = False,
    sequence: bool = False,
    group: GroupLike = None,
    verbose: bool = True,
) -> dict[str, Style]:
    """Propose a plan for a model, whatever its layers are called, and prove it.

    A copy of the model runs once, on a small batch. Autograd's graph shows which linear layers feed which. If
    the outputs of some reach one other layer and nothing else, they are column layers and that one is their
    row layer.

    Each such block is then run with its own inputs, whole and on simulated ranks. Its outputs and gradients
    decide where heads stay whole, in which order fused layers hold their features, which of the block's own
    numbers count heads, and how to treat the modules inside. If the heads of an attention cannot be divided,
    the outputs of its split layers are joined. Experts that are parameters of one module are split too.
    Embeddings of tokens, and heads with many classes, are split by vocabulary.

    At the end the whole copy is verified as by :func:`tp_shard.verify`, with the batch and with random values
    of other lengths, each block as it is. A block that is not right stays whole. Caches of keys and values
    are off.

    Args:
        model: The model; it is not changed. It may be on the meta device.
        batch: A batch that the model takes: a mapping by names, a tuple or list in order, or one value. By
            default one from the configuration of a transformers model, or tokens for an embedding.
        parallel_loss: Whether logits stay split, for a parallel loss; otherwise they are joined, so that any
            loss and ``generate()`` can follow.
        sequence: Whether lists of blocks work on parts of the sequence between their split layers (sequence
            parallelism, arXiv:2205.05198). That saves the memory of norms, residuals and dropouts. Each block
            gathers the sequence once before its column layers, and its row layer reduce-scatters it.
        group: The ranks; the current model-parallel group by default. On one rank the plan is proven for 2.
        verbose: Whether to print what the plan splits: the share of the weights, the bytes per rank. Also the
            layers that stay whole and why, and the calls that the plan was proven for.

    Returns:
        A plan for :func:`~tp_shard.parallelize`, with a name for each layer.

    Raises:
        ConfigError: Nothing in the model can be split.
        ModelError: The model cannot be called with the batch, or needs one; or it has no blocks that could
            work on parts of the sequence.

    Collectives: none; every rank finds the same plan.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> auto(model, torch.randn(4, 8), verbose=False)["2"]
        Row(heads=None, kv_heads=None)
    """
    ranks = as_group(group)
    count = max(2, ranks.size)
    proof = _proof(model, batch, count)
    plan = _verified(proof, count, parallel_loss=parallel_loss)
    plan = _with_sequences(proof, plan, count) if sequence else plan
    plan, notes = proof.everywhere(plan), _notes(proof, plan)
    _note_attention_of_torch(model, notes)
    if not plan:
        msg = (
            f"no layer of {type(model).__name__} could be split over {count} ranks and proven right "
            f"({reasons(notes) or 'it has no linear layer that feeds another'}); write a plan and verify it "
            "with ts.verify(), or leave the model whole"
        )
        raise ConfigError(msg)
    if verbose:
        print(describe(model, plan, notes, ranks.size))
        print(proof)
    return plan


@explain_arguments("from_hf(model, batch)")
def from_hf(
    model: nn.Module,
    batch: Any = None,
    *,
    parallel_loss: bool = False,
    sequence: bool = False,
    group: GroupLike = None,
    verbose: bool = True,
) -> dict[str, Style]:
    """Return a transformers model's own plan, translated, completed and proven.

    Its ``tp_plan`` names column and row layers, norms inside, experts and the vocabulary. It does not say how
    heads are divided, which numbers of an attention count them, or how fused layers are ordered: this is
    found and proven as in :func:`auto`. Some layers are joined in the model's plan only because DTensor
    cannot split them by heads; they are split by heads where that is proven.

    Args:
        model: A model of transformers; it is not changed. It may be on the meta device.
        batch: A batch that the model takes; by default one from its configuration.
        parallel_loss: Whether logits stay split, for a parallel loss.
        sequence: Whether lists of blocks work on parts of the sequence between their split layers. That saves
            the memory of norms, residuals and dropouts. Each block gathers the sequence once before its
            column layers, and its row layer reduce-scatters it.
        group: The ranks; the current model-parallel group by default. On one rank the plan is proven for 2.
        verbose: Whether to print what the plan splits: the share of the weights, the bytes per rank. Also the
            layers that stay whole and why, and the calls that the plan was proven for.

    Returns:
        A plan for :func:`~tp_shard.parallelize`, with a name for each layer.

    Raises:
        ConfigError: The model has no plan of its own: use :func:`auto`.
        ModelError: A module that its plan splits cannot be proven right; the message names it and the styles
            to write by hand. Or the model cannot be called.

    Collectives: none; every rank finds the same plan.
    """
    named = translate(model)
    ranks = as_group(group)
    count = max(2, ranks.size)
    proof = _proof(model, batch, count)
    restrict(proof, named)
    plan = _verified(proof, count, parallel_loss=parallel_loss, must=True)
    if sequence:
        plan = _with_sequences(proof, plan, count)
    plan = proof.everywhere(plan)
    if verbose:
        print(describe(model, plan, _notes(proof, plan), ranks.size))
        print(proof)
    return plan


def _notes(proof: Proof, plan: dict[str, Style]) -> dict[str, str]:
    """Return the reasons why modules that are not in the plan stay whole or are joined, by name."""
    why = {name: reason for name, reason in proof.flow.why.items() if name not in plan}
    return proof.everywhere({**why, **proof.notes})


def _proof(model: nn.Module, batch: Any, ranks: int) -> Proof:
    """Return the proof for a model and a batch."""
    check_whole(model)
    call = example_call(model) if batch is None else as_call(batch)
    name = type(model).__name__
    if call is None:
        msg = f"{name} cannot be called without a batch of yours: auto(model, batch) or from_hf(model, batch)"
        raise ModelError(msg)
    try:
        return prove(model, call, ranks)
    except Exception as error:
        if batch is None:
            msg = f"{name} fails on what was made up for it ({first_line(error)}); give a batch that it takes"
        else:
            msg = f"{name} fails on this batch: {type(error).__name__}: {error}"
        raise ModelError(msg) from error


def _verified(proof: Proof, ranks: int, *, parallel_loss: bool, must: bool = False) -> dict[str, Style]:
    """Return the proven plan with the vocabulary, without the blocks that make the whole model differ."""
    plan = dict(proof.plan)
    flow = proof.flow
    plan.update(vocabulary(proof.probe, plan, proof.notes, last=flow.heads, called=flow.called))
    plan = with_copies(proof.probe, plan)
    while plan:
        fault = proof.verify(plan, ranks)
        if fault is None:
            break
        if must:
            msg = (
                f"{fault}; leave it out of the plan, or write its styles by hand and verify them "
                "with ts.verify()"
            )
            raise ModelError(msg)
        plan = proof.without(plan, fault, ranks)
    if parallel_loss:
        plan = {n: Vocab() if isinstance(style, Vocab) else style for n, style in plan.items()}
    return plan


def _with_sequences(proof: Proof, plan: dict[str, Style], ranks: int) -> dict[str, Style]:
    """Return a plan under which blocks work on parts of the sequence."""
    result = with_sequences(proof.probe, plan, proof.flow.regions)
    if result == plan:
        msg = (
            f"{type(proof.probe).__name__} has no list of blocks with split layers that could share sequences"
        )
        raise ModelError(msg)
    joined = Vocab(gather_output=True)  # whole logits can be compared
    tried = {name: joined if isinstance(style, Vocab) else style for name, style in result.items()}
    fault = proof.verify(tried, ranks)
    if fault is not None:
        msg = (
            f"with sequence=True {fault}; write Sequence() and Gathered() by hand and verify them with "
            "ts.verify(), or leave sequence out"
        )
        raise ModelError(msg)
    return result


def _note_attention_of_torch(model: nn.Module, notes: dict[str, str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            notes[name] = "torch's own attention reads its weights past its layers"
