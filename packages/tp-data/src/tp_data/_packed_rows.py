"""Batches of tokens: padded samples, rows of documents, and what lets a model keep documents apart.

A row with documents of 3 and 2 tokens, and one token of padding::

    input_ids     5  8  2 | 7  4 | 0
    documents     0  0  0 | 1  1 | -1
    position_ids  0  1  2 | 0  1 | 0          begins again
    labels        .  8  2 | .  4 | .          -100: no label is predicted from another document
    cu_seqlens    0, 3, 5, 6                  where documents begin, in all rows of a batch one after the
    other
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from tp_core import recursive_to
from tp_core.arguments import explain_arguments
from tp_core.compare import (
    Bound,
    ComputedTypes,
    LocalTensor,
    Recording,
    TensorPlace,
    coarsest,
    distance,
    nudged,
    relative_error,
    undisturbed,
)
from tp_core.data import CountedBatch
from tp_core.errors import ConfigError, LoaderError, ModelError

if TYPE_CHECKING:
    import torch.nn.attention.flex_attention

IGNORED = -100  # torch's and transformers' number of a label that does not count

Arguments = Literal["mask", "positions", "flash", "documents"]
"""The form in which a model gets the documents of rows: see `RowForm`."""

Document = tuple[Any, int, int | None]
"""A sample, and where the piece of it in a row begins and ends."""


class TokenBatch(CountedBatch):
    """A batch of tokens that knows how many labels its loss is a mean over.

    It is a dict: ``model(**batch)`` works. The trainer takes :meth:`weight` as the step's ``"weight"``,
    unless the step returns one.

    Args:
        values: The arguments of the model, by name.
        causal: Whether labels are shifted by the model: the first one of a row is never predicted.
        tokens: The number of tokens without padding.
        form: The form of packed rows; ``None`` for padded samples.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        causal: bool = True,
        tokens: int = 0,
        form: "RowForm | None" = None,
    ) -> None:
        super().__init__(values)
        self.causal, self.tokens, self.form = causal, tokens, form
        if form is not None:
            self.row_length = values["input_ids"].size(1)
        else:
            self.row_length = None

    def weight(self) -> Tensor | None:
        """Return the number of labels that count; ``None`` without labels."""
        labels = self.get("labels")
        if not isinstance(labels, Tensor):
            return None
        if self.causal and labels.dim() == 2:
            counted = labels[:, 1:]
        else:
            counted = labels
        return (counted != IGNORED).sum()

    def check(self, step: Any, model: nn.Module) -> None:
        """Check that a step keeps packed documents apart, by `check_packing`; padded samples are apart."""
        rows = self.get("input_ids")
        # Rows of another length are slices, of a backend that compares them with whole rows itself.
        if self.form is not None and self.form.check and rows is not None and rows.size(1) == self.row_length:
            check_packing(model, self, step=step)

    def ignore(self, rows: Sequence[int]) -> None:
        """Let the labels of rows count nothing."""
        if len(rows) and isinstance(self.get("labels"), Tensor):
            self["labels"][list(rows)] = IGNORED

    def measure(self) -> dict[str, float]:
        """Return the numbers of tokens, of tokens with padding, and of labels that count."""
        first = self.get("input_ids")
        if isinstance(first, Tensor):
            padded = first.numel()
        else:
            padded = self.tokens
        weight = self.weight()
        labels = {} if weight is None else {"labels": float(weight)}
        return {"tokens": float(self.tokens), "padded_tokens": float(padded), **labels}


def pad_samples(samples: Sequence[Any], longest: int, *, padding: int) -> dict[str, Tensor]:
    """Return samples as one batch: fields of one entry per token are padded, others stacked.

    Args:
        samples: Dicts, or sequences of tokens.
        longest: The length to pad to.
        padding: The token to pad ``"input_ids"`` with; ``"labels"`` are padded with -100, other fields
            with 0.

    Raises:
        LoaderError: Samples have different fields, or fields that no tensor can be made of.
    """
    rows = [s if isinstance(s, Mapping) else {"input_ids": s} for s in samples]
    fillers = {"input_ids": padding, "labels": IGNORED}
    batch = {}
    for name in rows[0]:
        values = [_as_tensor(row, name) for row in rows]
        if values[0].dim() == 1 and all(len(v) == _tokens(row) for v, row in zip(values, rows, strict=True)):
            whole = values[0].new_full((len(values), longest), fillers.get(name, 0))
            for to, value in zip(whole, values, strict=True):
                to[: len(value)] = value
            batch[name] = whole
        elif all(v.shape == values[0].shape for v in values):
            batch[name] = torch.stack(values)
        else:
            shapes = [tuple(v.shape) for v in values][:4]
            msg = (
                f"the field {name!r} of samples has shapes {shapes}, and neither one entry for each token "
                "nor the same shape: give TokenBudget(collate=...)"
            )
            raise LoaderError(msg)
    if "attention_mask" not in batch and "input_ids" in batch:
        lengths = torch.tensor([_tokens(row) for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def _tokens(row: Mapping[str, Any]) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    return -1


def _as_tensor(sample: Mapping[str, Any], name: str) -> Tensor:
    if name not in sample:
        msg = f"a sample has no field {name!r}, which the first of its batch has; it has {sorted(sample)}"
        raise LoaderError(msg)
    try:
        return torch.as_tensor(sample[name])
    except (TypeError, ValueError, RuntimeError) as error:
        msg = (
            f"the field {name!r} of a sample cannot become a tensor: {sample[name]!r:.60} ({error}); leave "
            "it out of the samples, or make batches with collate="
        )
        raise LoaderError(msg) from error


# -- Rows of documents -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowForm:
    """The form in which a model gets rows of documents.

    All have ``input_ids``, ``labels`` and ``position_ids``, (rows, tokens). Beside these:

    - ``"mask"``: ``attention_mask``, (rows, 1, tokens, tokens), of bool. For any model of transformers with
      ``sdpa``, and for torch's own attention.
    - ``"positions"``: nothing. Decoders of transformers find documents where positions begin again, if they
      keep no cache, so ``use_cache`` is false.
    - ``"flash"``: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, which
      transformers passes to ``flash_attention_2`` and its like.
    - ``"documents"``: ``documents``, (rows, tokens), and ``cu_seqlens``. For models of your own, with
      `document_mask` or `document_block_mask`.

    Attributes:
        arguments: One of these.
        causal: Whether a token sees only those before it in its document, and predicts the next one.
        padding: The token that fills up rows.
        check: Whether `Trainer.fit` calls `check_packing` before its first step.

    Raises:
        ConfigError: ``arguments`` is none of these, or is for causal models and the model is not.
    """

    arguments: Arguments = "mask"
    causal: bool = True
    padding: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.arguments not in get_args(Arguments):
            msg = f"arguments={self.arguments!r}: take one of {', '.join(map(repr, get_args(Arguments)))}"
            raise ConfigError(msg)
        if self.arguments == "positions" and not self.causal:
            msg = "arguments='positions' is for decoders, which are causal; take 'mask' for an encoder"
            raise ConfigError(msg)

    def make(self, rows: Sequence[Sequence[Document]], length: int) -> TokenBatch:
        """Return a batch of rows.

        Args:
            rows: The documents of each row.
            length: The tokens of a row.

        Raises:
            LoaderError: Documents have different fields, or fields without one entry for each token.
        """
        pieces = [[self._cut(*document) for document in row] for row in rows]
        first = next((piece for row in pieces for piece in row), None)
        if first is None:
            empty = torch.zeros(0, dtype=torch.long)
            first = {"input_ids": empty}
            if self.causal:
                first["labels"] = empty
        fillers = {"input_ids": self.padding, "labels": IGNORED}
        fields = {n: t.new_full((len(rows), length), fillers.get(n, 0)) for n, t in first.items()}
        documents = torch.full((len(rows), length), -1)
        positions = torch.zeros((len(rows), length), dtype=torch.long)
        bounds, longest, tokens = [0], 0, 0
        for r, row in enumerate(pieces):
            at = 0
            for number, piece in enumerate(row):
                if piece.keys() != first.keys():
                    names = f"{sorted(first)} and {sorted(piece)}"
                    msg = f"samples have different fields: {names}; give all the same"
                    raise LoaderError(msg)
                stop = at + len(piece["input_ids"])
                for name, values in piece.items():
                    fields[name][r, at:stop] = values
                documents[r, at:stop] = number
                positions[r, at:stop] = torch.arange(stop - at)
                bounds.append(r * length + stop)
                longest, at = max(longest, stop - at), stop
            tokens += at
            if at < length:
                positions[r, at:] = torch.arange(length - at)
                bounds.append((r + 1) * length)
                longest = max(longest, length - at)
        batch = TokenBatch(fields, causal=self.causal, tokens=tokens, form=self)
        batch["position_ids"] = positions
        self._add_arguments(batch, documents, torch.tensor(bounds, dtype=torch.int32), longest)
        return batch

    def _add_arguments(self, batch: TokenBatch, documents: Tensor, bounds: Tensor, longest: int) -> None:
        if self.arguments == "mask":
            batch["attention_mask"] = document_mask(documents, causal=self.causal)
        elif self.arguments == "positions":
            batch["use_cache"] = False
        elif self.arguments == "flash":
            batch.update(
                cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest
            )
        else:
            batch.update(documents=documents, cu_seqlens=bounds)

    def _cut(self, sample: Any, start: int, stop: int | None) -> dict[str, Tensor]:
        """Return the fields of a piece of a sample, with labels that may count."""
        if isinstance(sample, Mapping):
            named = sample
        else:
            named = {"input_ids": sample}
        fields = {}
        for name in named:
            value = _as_tensor(named, name)
            if value.dim() != 1 or len(value) != _tokens(named):
                msg = (
                    f"the field {name!r} of a sample, of shape {tuple(value.shape)}, has not one entry for "
                    f"each of its {_tokens(named)} tokens, so it cannot be packed; leave it out of the "
                    "samples"
                )
                raise LoaderError(msg)
            if name == "attention_mask":
                if not bool(value.all()):
                    msg = "a sample's attention_mask hides tokens; give samples without padding to pack them"
                    raise LoaderError(msg)
                continue
            fields[name] = value[start:stop]
        if self.causal:
            labels = fields.get("labels", fields["input_ids"]).clone().long()
            labels[:1] = IGNORED
            fields["labels"] = labels
        return fields


# -- Masks -----------------------------------------------------------------------------------------


@explain_arguments("document_mask(documents)")
def document_mask(documents: Tensor, *, causal: bool = True) -> Tensor:
    """Return the mask of `scaled_dot_product_attention` that keeps documents apart.

    Args:
        documents: The number of the document of each token, (rows, tokens).
        causal: Whether a token sees only those before it.

    Returns:
        Whether a token sees another, (rows, 1, tokens, tokens).

    Example:
        >>> document_mask(torch.tensor([[0, 0, 1]])).int()
        tensor([[[[1, 0, 0],
                  [1, 1, 0],
                  [0, 0, 1]]]], dtype=torch.int32)
    """
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        return mask.tril()
    return mask


@explain_arguments("document_block_mask(documents)")
def document_block_mask(
    documents: Tensor, *, causal: bool = True
) -> "torch.nn.attention.flex_attention.BlockMask":
    """Return the mask of ``torch.nn.attention.flex_attention`` that keeps documents apart.

    Blocks of other documents are left out, so that attention costs what the documents alone would.

    Args:
        documents: The number of the document of each token, (rows, tokens), on the device of the model.
        causal: Whether a token sees only those before it.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # it loads torch's compiler

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        same = documents[row, query] == documents[row, key]
        if causal:
            return same & (query >= key)
        return same

    rows, tokens = documents.shape
    return create_block_mask(sees, rows, None, tokens, tokens, device=documents.device)


# -- The check that a model keeps documents apart -------------------------------------------------


_LENGTHS = (7, 12, 5)  # of the documents that are tried; none is a multiple of another


class _RowRun(NamedTuple):
    """What one run of a step returned: outputs as modules end, the loss, the labels that count, the types."""

    outputs: Mapping[TensorPlace, LocalTensor]
    loss: float | None
    weight: float
    dtypes: frozenset[torch.dtype]


@torch.no_grad()
def check_packing(
    model: nn.Module, batch: TokenBatch, *, step: Callable[[nn.Module, Any], Any] | None = None
) -> None:
    """Check that a model keeps the documents of packed rows apart.

    Three documents of the batch's first tokens go through the model in one row, and each by itself. Outputs
    and losses must be the same. A model that ignores the mask or the positions is refused: state-space
    layers, convolutions, attention that takes no mask. The check runs modules in evaluation mode.

    Args:
        model: The model, or its wrapper.
        batch: A batch that `Packed` made, on the model's device.
        step: ``step(model, batch)`` returns the loss, or a dict with it; ``model(**batch)`` by default.

    Raises:
        ModelError: The model mixes up documents, or it fails on a packed row; the first module is named.

    Example:
        >>> batch = RowForm().make([[(list(range(1, 9)), 0, None)]], 8)
        >>> model = nn.Embedding(9, 4)
        >>> check_packing(model, batch, step=lambda model, b: model(b["input_ids"]).sum())  # doctest: +SKIP
    """
    form = batch.form
    if form is None:
        msg = "check_packing() needs a batch of packed rows, as Packed makes it, got one of padded samples"
        raise ModelError(msg)
    form = replace(form, check=False)  # a step may check its batch, such as the first of a trainer
    # A step may need the arguments of packed rows; a model that is called without one must not.
    is_plain = step is None and form.arguments != "documents"
    step = step or (lambda module, values: module(**values))
    documents = _documents(batch)
    device = batch["input_ids"].device
    run = partial(_run, step, model, form, device=device)
    with undisturbed(model):
        model.eval()
        packed = run(documents)
        separate = near = [run([document], is_plain=is_plain) for document in documents]
        dtypes = {parameter.dtype for parameter in model.parameters()}
        dtype = coarsest(dtypes.union(*(row_run.dtypes for row_run in (packed, *separate))))
        if dtype != torch.float64:
            with nudged(model, dtype):
                near = [run([document], is_plain=is_plain) for document in documents]
    problem = _compare(model, packed, separate, near, Bound.of([dtype]))
    if problem:
        msg = (
            f"this model mixes up the documents of packed rows: {problem}. Take another form of their "
            f"bounds, which is arguments={form.arguments!r} now (for models of transformers 'mask' with "
            "attn_implementation='sdpa'), or batches that are not packed: TokenBudget"
        )
        raise ModelError(msg)


def _documents(batch: TokenBatch) -> list[dict[str, Tensor]]:
    """Return short documents of the batch's first tokens, with labels that count."""
    hidden = {"position_ids", "attention_mask", "documents"}
    shape = batch["input_ids"].shape
    flat = {
        name: values.reshape(-1)
        for name, values in batch.items()
        if isinstance(values, Tensor) and values.shape == shape and name not in hidden
    }
    if batch.causal or "labels" in flat:
        flat["labels"] = flat["input_ids"]
    tokens = len(flat["input_ids"])
    index = torch.arange(sum(_LENGTHS), device=flat["input_ids"].device) % max(tokens, 1)
    pieces = {name: values[index].split(list(_LENGTHS)) for name, values in flat.items()}
    return [{name: values[i] for name, values in pieces.items()} for i in range(len(_LENGTHS))]


def _run(
    step: Callable[[nn.Module, Any], Any],
    model: nn.Module,
    form: RowForm,
    documents: Sequence[Mapping[str, Tensor]],
    *,
    device: torch.device,
    is_plain: bool = False,
) -> _RowRun:
    batch = form.make([[(d, 0, None) for d in documents]], sum(len(d["input_ids"]) for d in documents))
    if is_plain:
        for name in batch.keys() - documents[0].keys():
            del batch[name]
    batch = recursive_to(batch, device)
    try:
        with Recording(model) as recording, ComputedTypes() as computed:
            output = step(model, batch)
    except Exception as error:
        if len(documents) > 1:
            subject = "packed documents"
        else:
            subject = "a document by itself"
        msg = (
            f"the step fails on a short row with {subject}, by which packing is checked: "
            f"{type(error).__name__}: {error!s:.300}"
        )
        raise ModelError(msg) from error
    loss, weight = output, batch.weight()
    if isinstance(output, Mapping):
        loss, weight = output.get("loss"), output.get("weight", weight)
    is_loss = isinstance(loss, Tensor) and loss.numel() == 1
    return _RowRun(
        outputs=recording.outputs,
        loss=float(loss) if is_loss else None,
        weight=1.0 if weight is None else float(weight),
        dtypes=frozenset(computed.dtypes),
    )


def _compare(
    model: nn.Module, packed: _RowRun, separate: Sequence[_RowRun], near: Sequence[_RowRun], bound: Bound
) -> str:
    """Return the sentence of the first difference, or nothing; ``near`` has roundings of its own."""
    is_off, first = False, ""
    modules = dict(model.named_modules())
    for place, (value, _) in packed.outputs.items():
        expected, rounded = _joined(place, value, separate), _joined(place, value, near)
        if expected is None or distance(expected, value) <= bound.limit(expected, rounded):
            continue
        is_off = is_off or not place.module
        first = first or (
            f"{place.module or 'the model'!r} ({type(modules[place.module]).__name__}) computes something "
            "else for a document in a row with others than for the document alone (a difference of "
            f"{relative_error(expected, value):.1e})"
        )
    means = _mean_loss(separate), _mean_loss(near)
    if packed.loss is not None and means[0] is not None:
        mean, rounded_mean = (torch.tensor(each, dtype=torch.float64) for each in means)
        total = sum(run.loss or 0.0 for run in separate)  # of a loss that is a sum
        limit = bound.limit(mean, rounded_mean, max(1.0, abs(means[0])))
        is_off = is_off or not min(abs(packed.loss - means[0]), abs(packed.loss - total)) <= limit
    if not is_off:
        return ""
    return first or (
        f"its loss is {packed.loss:.6g} for three documents in a row, and {means[0]:.6g} for the mean over "
        "their labels when each is alone"
    )


def _joined(place: TensorPlace, row: Tensor, separate: Sequence[_RowRun]) -> Tensor | None:
    """Return what a module returned for separate documents as one row; ``None`` where these are no tokens.

    For example the rows of a routed expert, which runs for some tokens only.
    """
    pieces = [run.outputs[place].tensor for run in separate if place in run.outputs]
    tokens = sum(_LENGTHS)
    is_row = row.dim() >= 2 and row.shape[:2] == (1, tokens)
    if not is_row or len(pieces) < len(separate) or any(piece.dim() != row.dim() for piece in pieces):
        return None
    if [piece.size(1) for piece in pieces] != list(_LENGTHS):
        return None
    return torch.cat(pieces, 1)


def _mean_loss(separate: Sequence[_RowRun]) -> float | None:
    """Return the mean loss over the labels of all documents; ``None`` where one has no loss."""
    losses = [run.loss for run in separate if run.loss is not None]
    if len(losses) < len(separate):
        return None
    weights = [run.weight for run in separate]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
