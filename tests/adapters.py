"""Train adapters of peft on every backend, and print where the numbers are those of one device.

    python -m tests.adapters [WORD ...]        cases with all of the words in their names

A case is a family of models, a kind of adapters and a backend. It is trained there, and from its checkpoint
in the middle on another backend. Losses and weights are compared with a loop by hand on one device. It is

    right      losses, trained weights and their averages are equal to 1e-5, both times; frozen weights are
               unchanged, without gradients and without state of the optimizer
    refused    every rank raised the same error of tp's own before the first step
    wrong      anything else
"""

import functools
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import TpError
from tp_core.state import open_tensors
from tp_shard import ShardOptions
from tp_testing import RankPool
from tp_trainer import Checkpoints, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage

# -- Models with adapters -------------------------------------------------------------------------

TOKENS, LENGTH = 96, 7
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
DECODER = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **ENDS}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}
BERT = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "max_position_embeddings": 64}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT |= {"image_size": 8, "patch_size": 4, "num_labels": 3}
T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "use_cache": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of a kind.

    Attributes:
        model: The name of the class in transformers.
        config: The name of its configuration.
        sizes: What that is made with.
        task: The task, as peft calls it.
        vectors: The layers that IA3 adapts.
        inputs: Those of them whose inputs it scales.
        saved: The module that ``modules_to_save`` names.
        dropouts: The options that are 0 for models without dropout.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    task: str | None
    vectors: str
    inputs: str
    saved: str = "lm_head"
    dropouts: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        sizes=DECODER,
        task="CAUSAL_LM",
        vectors="k_proj v_proj down_proj",
        inputs="down_proj",
    ),
    "qwen2": Family(
        model="Qwen2ForCausalLM",
        config="Qwen2Config",
        sizes=DECODER,
        task="CAUSAL_LM",
        vectors="k_proj v_proj down_proj",
        inputs="down_proj",
    ),
    "mistral": Family(
        model="MistralForCausalLM",
        config="MistralConfig",
        sizes=DECODER,
        task=None,
        vectors="k_proj v_proj up_proj",
        inputs="up_proj",
    ),
    "gpt2": Family(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        sizes=GPT2,
        task="CAUSAL_LM",
        vectors="c_attn mlp.c_proj",
        inputs="mlp.c_proj",
        saved="ln_f",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "bert": Family(
        model="BertForSequenceClassification",
        config="BertConfig",
        sizes=BERT,
        task="SEQ_CLS",
        vectors="key value dense",
        inputs="dense",
        saved="classifier",
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "t5": Family(
        model="T5ForConditionalGeneration",
        config="T5Config",
        sizes=T5,
        task="SEQ_2_SEQ_LM",
        vectors="k v wo",
        inputs="wo",
        saved="final_layer_norm",
        dropouts=("dropout_rate",),
    ),
    "vit": Family(
        model="ViTForImageClassification",
        config="ViTConfig",
        sizes=VIT,
        task=None,
        vectors="k_proj v_proj fc2",
        inputs="fc2",
        saved="classifier",
    ),
}
TABLE = tuple(FAMILIES)
FAMILIES["llama-one-key-head"] = replace(
    FAMILIES["llama"], sizes=DECODER | {"num_key_value_heads": 1, "attention_bias": True}
)
KINDS = ("lora", "rslora", "dora", "ia3", "several", "saved")


def plain(family: str, **sizes: Any) -> nn.Module:
    """Return a model without adapters."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    of = FAMILIES[family]
    model: nn.Module = getattr(transformers, of.model)(getattr(transformers, of.config)(**(of.sizes | sizes)))
    return model


def configuration(family: str, kind: str, **options: Any) -> Any:
    """Return the configuration of an adapter."""
    import peft

    of = FAMILIES[family]
    if kind == "ia3":
        chosen = {"target_modules": of.vectors.split(), "feedforward_modules": of.inputs.split()}
        return peft.IA3Config(task_type=of.task, **chosen)
    # The same factor for both: with a larger one the softmax of T5 saturates, and rounding alone differs.
    given = {
        "r": 4,
        "lora_alpha": 4 if kind == "rslora" else 8,
        "target_modules": "all-linear",
        "fan_in_fan_out": family == "gpt2",
        **({"modules_to_save": [of.saved]} if kind == "saved" else {}),
        **options,
    }
    task = None if kind == "several" else of.task  # peft trains one head of a task at a time
    return peft.LoraConfig(task_type=task, use_rslora=kind == "rslora", use_dora=kind == "dora", **given)


def draw_adapters(model: nn.Module) -> None:
    """Give adapters values that matter: peft begins with a B of zeros, and vectors of ones."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name or "ia3_" in name:
            p.data.add_(0.2 * torch.randn_like(p))


def adapted(family: str, kind: str, *, base: nn.Module | None = None, **options: Any) -> Any:
    """Return a model with adapters, the ones that are trained active."""
    import peft

    warnings.simplefilter("ignore")  # peft's own, of transformers
    model: Any = peft.get_peft_model(base or plain(family), configuration(family, kind, **options))
    if kind == "several":
        model.add_adapter("other", configuration(family, kind, **{**options, "r": 2}))
        model.base_model.set_adapter(["default", "other"])
    draw_adapters(model)
    return model


# -- Their training: batches with unequal numbers of labels ---------------------------------------

SAMPLES, BATCH_SIZE, EPOCHS = 10, 4, 2
MIDDLE = 4  # of 6 steps; in the second epoch
NO_LABEL, DECAY = -100, 0.5


def samples(family: str) -> list[dict[str, torch.Tensor]]:
    """Return samples with unequal numbers of labels, and of tokens."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for i in range(SAMPLES):
        if family == "vit":
            image = torch.randn(3, 8, 8, generator=generator).double()
            found.append({"pixel_values": image, "labels": torch.tensor(NO_LABEL if i % 4 == 1 else i % 3)})
            continue
        ids = torch.randint(5, TOKENS, (LENGTH,), generator=generator)
        is_there = torch.arange(LENGTH) < LENGTH - i % 4
        sample = {"input_ids": ids * is_there, "attention_mask": is_there.long()}
        if family == "bert":
            sample["labels"] = torch.tensor(NO_LABEL if i % 4 == 1 else i % 2)
        elif family == "t5":
            sample["labels"] = torch.where(is_there, ids.flip(0), NO_LABEL)
            sample["decoder_input_ids"] = ids.flip(0).roll(1)
        else:
            is_answer = is_there & (torch.arange(LENGTH) >= i % 3)
            sample["labels"] = torch.where(is_answer, ids, NO_LABEL).roll(-1)
            sample["labels"][-1] = NO_LABEL
        found.append(sample)
    return found


def step(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean loss over the labels of a batch, and their number."""
    labels = batch["labels"]
    scores = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    total = nn.functional.cross_entropy(
        scores.flatten(0, -2), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )
    count = (labels != NO_LABEL).sum()
    return {"loss": total / count.clamp(min=1), "weight": count}


def loader(family: str) -> "DataLoader[Any]":
    return DataLoader(samples(family), batch_size=BATCH_SIZE)  # type: ignore[arg-type]  # a list will do


def make(family: str, kind: str) -> Any:
    """Return the model that is trained: in double precision and without dropout."""
    base = plain(family, **dict.fromkeys(FAMILIES[family].dropouts, 0.0))
    return adapted(family, kind, base=base).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer over all parameters, those without gradients too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""The losses of the epochs, the state of the model, and that with averages of what was trained."""


@functools.cache
def by_hand(family: str, kind: str, epochs: int = EPOCHS) -> tuple[Trained, frozenset[str]]:
    """Return what a loop without tp ends with, on one device, and the names of what it trains."""
    model = make(family, kind).train()
    optimizer = make_optimizer(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses = []
    averages: dict[str, torch.Tensor] = {}
    for _ in range(epochs):
        total = count = 0.0
        for batch in loader(family):
            optimizer.zero_grad()
            output = step(model, batch)
            output["loss"].backward()
            optimizer.step()
            averages = {
                n: averages.get(n, p.detach()).lerp(p.detach(), 1 - DECAY) for n, p in trained.items()
            }
            total, count = total + (output["loss"] * output["weight"]).item(), count + output["weight"].item()
        losses.append(total / count)
    return (losses, model.state_dict(), averages), frozenset(trained)


# -- Backends -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A backend, on a number of ranks, and what the trainer is made with."""

    ranks: int
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> bool:
        return self.arguments["backend"] == "shard"


_TWO = ["cpu", "cpu"]
PLACES = {
    "single": Place(1, {"backend": "single", "devices": "cpu"}),
    "tuple": Place(1, {"backend": "tuple", "devices": _TWO}),
    "dp-gather": Place(1, {"backend": "dp-gather", "devices": _TWO}),
    "ddp 2": Place(2, {"backend": "ddp", "devices": "cpu"}),
    "fsdp 2": Place(2, {"backend": "fsdp", "devices": "cpu"}),
    "shard 2": Place(2, {"backend": "shard", "devices": "cpu"}),
    "shard x fsdp 4": Place(
        4, {"backend": "shard", "devices": "cpu", "options": ShardOptions(group_size=2, data="fsdp")}
    ),
}


@functools.cache
def plan_of(family: str, kind: str) -> dict[str, Any]:
    """Return the plan that is found for a model on groups of two ranks."""
    first = next(iter(loader(family)))
    batch = {name: value for name, value in first.items() if name != "labels"}
    return ts.plans.auto(make(family, kind), batch, verbose=False)


def train(
    family: str,
    kind: str,
    place: str,
    plan: dict[str, Any] | None,
    checkpoint: Checkpoints,
    resume: Path | str | None,
    epochs: int,
    max_steps: int | None,
) -> Trained | str:
    """Train on a backend; return what it ends with, or the error of tp's own."""
    torch.set_num_threads(1)
    log = logging.getLogger("tp_trainer")
    level = log.level
    log.setLevel(logging.ERROR)  # it says that the number of ranks is another one
    model, average = make(family, kind), ExponentialMovingAverage(DECAY)
    optimizer = make_optimizer(model)
    if plan is not None:
        ts.distributed.init_process_group(2)
    try:
        if plan is not None:
            ts.parallelize(model, plan)
            optimizer = make_optimizer(model)
        with Trainer(seed=0, progress=False, **PLACES[place].arguments) as trainer:
            history = trainer.fit(
                model,
                optimizer,
                loader(family),
                step=step,
                epochs=epochs,
                max_steps=max_steps,
                checkpoint=checkpoint,
                resume=resume,
                callbacks=[average],
            )
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert not any(p.grad is not None or p in optimizer.state for p in frozen)
            state = trainer.session.model_state(model)
            state = {name: value.clone() for name, value in state.items()}
            with average.in_place_of(model):
                averages = {n: v.clone() for n, v in trainer.session.model_state(model).items()}
            return [r.train["loss"] for r in history], state, averages
    except TpError as error:
        if optimizer.state:  # it came after the first step
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        log.setLevel(level)
        if plan is not None:
            ts.distributed.destroy_process_group()


class Places:
    """Where cases are trained: this process, and pools of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returns on each rank."""
        if ranks == 1:
            return [function(*args)]
        return self._pools.setdefault(ranks, RankPool(ranks)).run(function, *args)

    def train(
        self,
        family: str,
        kind: str,
        place: str,
        checkpoint: Checkpoints,
        resume: Path | str | None = None,
        *,
        epochs: int = EPOCHS,
        max_steps: int | None = None,
    ) -> list[Trained | str]:
        """Return what each rank ends with."""
        plan = plan_of(family, kind) if PLACES[place].splits else None
        return self.run(
            PLACES[place].ranks, train, family, kind, place, plan, checkpoint, resume, epochs, max_steps
        )

    def check(self, family: str, kind: str, begun: str, finished: str) -> str:
        """Return "right", "refused: ..." or "wrong: ..." of a case that another backend finishes."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                whole = Checkpoints(Path(folder, "through"), every_steps=MIDDLE, every_epochs=None)
                through = self.train(family, kind, begun, whole)
                said = verdict(family, kind, through)
                if said != "right":
                    return said
                start = Path(folder, "through", f"step-{MIDDLE:010}")
                resumed = self.train(
                    family, kind, finished, replace(whole, folder=Path(folder, "resumed")), start
                )
                said = verdict(family, kind, resumed)
        except Exception as error:  # noqa: BLE001 - it is printed
            return f"wrong: {type(error).__name__}: {error}"
        # A backend that refuses the case has a row of its own.
        return "right" if said.startswith("refused") else said.replace(":", f": finished on {finished},", 1)

    def check_all(self, family: str, kind: str) -> str:
        """Return the same of a run that is interrupted after each step, and resumed on the next backend.

        Its checkpoints have what is trained alone.
        """
        said, epochs = "", 3
        with tempfile.TemporaryDirectory() as folder:
            rules = Checkpoints(folder, weights="trainable", keep=1, best="loss", background=True)
            for done, place in enumerate(PLACES, start=1):
                until = done if done < len(PLACES) else None
                ended = self.train(family, kind, place, rules, "auto", epochs=epochs, max_steps=until)
                stored = open_tensors(max(Path(folder).glob("step-*"))).infos
                (_, state, _), trained = by_hand(family, kind, epochs)
                if extra := [n for n in state if f"model.{n}" in stored and n not in trained]:
                    return f"wrong: a checkpoint has {extra[0]}"
                if until is None or isinstance(ended[0], str):
                    said = verdict(family, kind, ended, epochs)
        return said


def verdict(family: str, kind: str, found: list[Trained | str], epochs: int = EPOCHS) -> str:
    """Compare what all ranks ended with to what is expected."""
    refusals = [each for each in found if isinstance(each, str)]
    if refusals:
        is_alike = refusals == [refusals[0]] * len(found)
        return f"refused: {refusals[0]}" if is_alike else f"wrong: not all ranks raised: {refusals[0]}"
    (losses, state, averages), trained = by_hand(family, kind, epochs)
    for ended in found:
        assert not isinstance(ended, str)
        if list(ended[1]) != list(state):
            return "wrong: the state has other names"
        off = max(abs(a - b) / abs(b) for a, b in zip(ended[0], losses, strict=True))
        if off > LIMIT:
            return f"wrong: losses are off by {off:.1e}"
        for name, expected in [*state.items(), *averages.items()]:
            limit = LIMIT * expected.abs().max().item() if name in trained else 0.0
            off = (ended[1 if expected is state[name] else 2][name] - expected).abs().max().item()
            if not off <= limit:
                what = name if expected is state[name] else f"the average of {name}"
                return f"wrong: {what} is off by {off:.1e}"
    return "right"


LIMIT = 1e-5


def cases() -> Iterable[tuple[str, str, str, str]]:
    """Yield each family, kind and backend, with the backend that finishes it: another one each time."""
    names = list(PLACES)
    for number, (family, kind) in enumerate(itertools.product(TABLE, KINDS)):
        for index, begun in enumerate(names):
            other = (index + 1 + (number + index) % (len(names) - 1)) % len(names)
            yield family, kind, begun, names[other]


def main(words: list[str]) -> int:
    counts = {"right": 0, "refused": 0, "wrong": 0}
    with Places() as places:
        for family, kind, begun, finished in cases():
            if not all(word in f"{family} {kind} {begun}" for word in words):
                continue
            said = places.check(family, kind, begun, finished)
            counts[said.partition(":")[0]] += 1
            print(f"{family:8} {kind:8} {begun:15} -> {finished:15} {said}", flush=True)
    print(", ".join(f"{word} {count}" for word, count in counts.items()))
    return counts["wrong"]


if __name__ == "__main__":
    from tests import adapters  # so that ranks import it by its name

    sys.exit(min(1, adapters.main(sys.argv[1:])))
