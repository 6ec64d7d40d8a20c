"""What a script is: its kind, the names in it, and why it cannot be moved."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

# What a script imports or calls that tp has another way for, with that way.
_OTHER_WAYS = {
    "accelerate.local_sgd": "LocalSGD is not here: gradients are averaged in every step",
    "colossalai": "write trainer.fit with Trainer(backend='fsdp')",
    "deepspeed": "write trainer.fit with Trainer(backend='fsdp')",
    "fairscale": "write trainer.fit with Trainer(backend='fsdp')",
    "horovod": "write trainer.fit: tp launch starts the ranks",
    "lightning.fabric": "write trainer.prepare and trainer.backward; the page of names has the others",
    "lightning.pytorch.cli": "LightningCLI makes its own Trainer: call Trainer(...).fit(model, datamodule)",
    "lightning_fabric": "write trainer.prepare and trainer.backward; the page of names has the others",
    "torch.distributed.fsdp": "leave fully_shard out, and write Trainer(backend='fsdp')",
    "torch.distributed.pipelining": "write Trainer(backend='pipeline')",
    "torch.distributed.rpc": "tp has no remote calls",
    "torch.distributed.tensor.parallel": "write Trainer(backend='shard')",
}
_HUGGING_FACE = ("Trainer", "Seq2SeqTrainer")
_SCALERS = ("GradScaler",)
_GIVING = ("parameters", "named_parameters", "configure_optimizers")
_LIGHTNING = ("lightning", "pytorch_lightning")


@dataclass
class Facts:
    """What is known of a script.

    Attributes:
        kind: "accelerate", "lightning" or "loop".
        names: All names in it.
        training: The names of loaders that are iterated in loops with a backward pass.
        makers: For each name, the functions that it is assigned results of.
        models: The last names of models that optimizers train.
        loaders: The number of ``DataLoader(...)`` calls.
        is_parallel: Whether it joins a process group.
    """

    kind: str = "loop"
    names: set[str] = field(default_factory=set)
    training: set[str] = field(default_factory=set)
    makers: dict[str, set[str]] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    loaders: int = 0
    is_parallel: bool = False


def facts_of(tree: ast.Module) -> Facts | str:
    """Return the facts of a script, or the reason why it cannot be moved."""
    facts = Facts()
    modules = dict(_imports(tree))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = set(map(_last, calls))
    for module, way in _OTHER_WAYS.items():
        if any(name == module or name.startswith(f"{module}.") for name in modules.values()):
            return f"it uses {module}; {way}"
    facts.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(modules)
    roots = {name.partition(".")[0] for name in modules.values()}
    theirs = {name for name, module in modules.items() if module.partition(".")[0] == "transformers"}
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    if any(_last(n) in _HUGGING_FACE and ast.unparse(n).partition(".")[0] in theirs for n in calls + bases):
        return (
            "it trains by Hugging Face's Trainer, which builds loader, optimizer and scheduler from its "
            "TrainingArguments; write them, and trainer.fit(model, optimizer, loader, step=step, ...)"
        )
    if "accelerate" in roots:
        facts.kind = "accelerate"
        return facts
    if roots & set(_LIGHTNING):
        if "Fabric" in called:
            return f"it uses Fabric; {_OTHER_WAYS['lightning.fabric']}"
        if "Trainer" not in called:
            return "it uses Lightning, and has no call of its Trainer"
        facts.kind = "lightning"
        return facts
    backwards = [node for node in ast.walk(tree) if _is_backward(node)]
    if not backwards:
        return "it has no call of backward(): it does not train, or another file does, which you can move"
    if called & set(_SCALERS):
        return (
            "it scales its losses by GradScaler; write Trainer(precision='fp16-mixed') and "
            "trainer.update(model, optimizer), which unscales, clips and steps"
        )
    if not any(_makes_optimizer(node) for node in ast.walk(tree)):
        return "it has no optimizer over model.parameters() in this file: it changes weights by itself"
    if {"share_memory", "share_memory_"} & called:
        return "its processes share the weights in memory (Hogwild), which tp does not do"
    if any(_is_own_layer(node) for node in ast.walk(tree)):
        return (
            "its layers train themselves, each with an optimizer of its own: write a loop over them by hand"
        )
    if any(isinstance(node, ast.Constant) and node.value == 1e10 for node in ast.walk(tree)):
        return (
            "its sampler draws 1e10 samples in an epoch, and tp lays out the order of an epoch first; give "
            "the loader shuffle=True, and count steps in the loop"
        )
    facts.loaders = sum(
        isinstance(node, ast.Call) and _last(node.func) == "DataLoader" for node in ast.walk(tree)
    )
    facts.is_parallel = "init_process_group" in called
    facts.training = set(_trained_names(tree))
    facts.models = set(_trained_models(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in _targets(node.targets[0]):
                facts.makers.setdefault(_last(node.value.func), set()).add(target)
    return facts


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the module of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield one.asname or one.name.partition(".")[0], one.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _last(node: ast.AST) -> str:
    """Return the last name of ``a.b.c``, or ``""``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _targets(node: ast.AST) -> Iterator[str]:
    for each in node.elts if isinstance(node, ast.Tuple | ast.List) else [node]:
        yield _last(each)


def _is_backward(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    )


def _is_own_layer(node: ast.AST) -> bool:
    """Return whether a module makes an optimizer over ``self.parameters()``, to step it by itself."""
    return _makes_optimizer(node) and "self.parameters()" in ast.unparse(node)


def _makes_optimizer(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = _last(node.func)
    if name == "configure_optimizers":
        return True
    if not name or name[0].islower():
        return False
    found = [*node.args, *(word.value for word in node.keywords)]
    return any(
        isinstance(each, ast.Call) and _last(each.func) in ("parameters", "named_parameters")
        for each in found
    )


def _trained_models(tree: ast.Module) -> Iterator[str]:
    """Yield the last names of models that give an optimizer parameters."""
    for node in ast.walk(tree):
        if _makes_optimizer(node):
            for call in ast.walk(node):
                if (
                    isinstance(call, ast.Call)
                    and _last(call.func) in _GIVING
                    and "." in ast.unparse(call.func)
                ):
                    yield _last(call.func.value)  # type: ignore[attr-defined]  # an attribute, by its dot


def _trained_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of what is iterated in loops that train, directly or by a function that they call."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    trains = {name for name, node in functions.items() if any(map(_is_backward, ast.walk(node)))}
    while True:  # functions that call such functions train, too
        more = {
            name
            for name, node in functions.items()
            if any(isinstance(n, ast.Call) and _last(n.func) in trains for n in ast.walk(node))
        }
        if more <= trains:
            break
        trains |= more
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For):
            continue
        body = [node for statement in loop.body for node in ast.walk(statement)]
        if any(_is_backward(n) or (isinstance(n, ast.Call) and _last(n.func) in trains) for n in body):
            for node in ast.walk(loop.iter):
                if isinstance(node, ast.Name | ast.Attribute):
                    yield _last(node)
    for name in trains:  # an argument of a training function that its loop iterates has another name outside
        yield from _arguments_of(tree, functions, name)


def _arguments_of(tree: ast.Module, functions: dict[str, ast.FunctionDef], name: str) -> Iterator[str]:
    """Yield the names that callers give for what the loops of a training function iterate."""
    if name not in functions:
        return
    function = functions[name]
    iterated = {
        _last(node)
        for loop in ast.walk(function)
        if isinstance(loop, ast.For) and any(map(_is_backward, ast.walk(loop)))
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Name)
    }
    names = [argument.arg for argument in function.args.args]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _last(call.func) == name:
            for parameter, given in zip(names, call.args, strict=False):
                if parameter in iterated:
                    yield _last(given)
