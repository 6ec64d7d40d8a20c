"""The moved script: imports of another trainer replaced, or a loop of the script's own on tp's trainer."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m
from torch import nn
from tp_core.errors import ConfigError

# -- What a script is: its kind, the names in it, and why it cannot be moved -----------------------


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
        training: The names of loaders that are iterated in loops with a backward pass.
        makers: For each name, the functions that it is assigned results of.
        models: The last names of models that optimizers train.
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


# -- The moved script: imports of another trainer replaced, or a loop of the script's own on tp's trainer


_TRAINER = "tp_trainer"
# What is called as it stands: methods of modules, and what makes the optimizer, before there is a session.
_MODULE_NAMES = frozenset(dir(nn.Module)) | {"module", "configure_optimizers"}
_OF_RANKS = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
_SINGLE = {"LOCAL_RANK": "local_rank", "RANK": "rank", "WORLD_SIZE": "world_size"}
_LIGHTNING_ROOTS = ("lightning", "pytorch_lightning")
# What tp does: it joins the group, chooses the device, and a prepared loader counts its epochs.
_OF_TP = ("init_process_group", "destroy_process_group", "set_device", "set_device_index", "set_epoch")
_HELD_BACK = ("test", "val", "eval", "dev")


def moved(source: str, name: str) -> str:
    """Return the source of a script, moved to tp."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        msg = f"{name} is not Python: {error.msg} (line {error.lineno})"
        raise ConfigError(msg) from error
    facts = facts_of(tree)
    if isinstance(facts, str):
        msg = f"{name} was not moved: {facts}"
        raise ConfigError(msg)
    module = cst.parse_module(source)
    if facts.kind != "loop":
        return module.visit(_Imports(facts.kind)).code
    rewriter = _Loop(facts)
    changed = module.visit(rewriter)
    first = [f"import {_TRAINER}"]
    body = _after_imports(changed.body, [*first, f"{rewriter.tp} = {_TRAINER}.Trainer()"])
    return changed.with_changes(body=body).code


def _after_imports(body: Sequence[Any], lines: Sequence[str]) -> list[Any]:
    """Return the statements of a module with some lines after its first block of imports."""
    last = 0
    for number, statement in enumerate(body):
        if m.matches(statement, m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()])):
            last = number + 1
        elif m.matches(statement, m.ClassDef() | m.FunctionDef()):
            break
    new = [cst.parse_statement(line) for line in lines]
    return [*body[:last], *new, *body[last:]]


def _name_of(node: cst.CSTNode) -> str:
    """Return the dotted name of an expression, or ``""``."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = _name_of(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def _expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


class _Imports(cst.CSTTransformer):
    """Takes the trainer of another library from ``tp_trainer.compat``; all else of the script stays."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ours = {"accelerate": ("Accelerator",), "lightning": ("Trainer",)}[kind]
        self.needs_module = False
        self._own: list[cst.ImportFrom] = []

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        own, self._own = self._own, []
        return cst.FlattenSentinel([updated_node, *(cst.SimpleStatementLine([one]) for one in own)])

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        root = _name_of(updated_node.module).partition(".")[0] if updated_node.module else ""
        if root not in ("accelerate", *_LIGHTNING_ROOTS) or isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        mine = [one for one in updated_node.names if _name_of(one.name) in self.ours]
        if not mine:
            return updated_node
        own = updated_node.with_changes(
            module=_expression(f"tp_trainer.compat.{self.kind}"), names=_without_commas(mine)
        )
        others = [one for one in updated_node.names if one not in mine]
        if not others:
            return own
        self._own.append(own)
        return updated_node.with_changes(names=_without_commas(others))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        name = _name_of(updated_node)
        if name in ("L.Trainer", "pl.Trainer", "lightning.Trainer", "pytorch_lightning.Trainer"):
            self.needs_module = True
            return _expression("tp_lightning.Trainer")
        if name == "accelerate.Accelerator":
            self.needs_module = True
            return _expression("tp_accelerate.Accelerator")
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        if not self.needs_module:
            return updated_node
        line = f"from tp_trainer.compat import {self.kind} as tp_{self.kind}"
        return updated_node.with_changes(body=_after_imports(updated_node.body, [line]))


def _without_commas(names: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    *first, last = names
    return [
        *(n.with_changes(comma=between) for n in first),
        last.with_changes(comma=cst.MaybeSentinel.DEFAULT),
    ]


class _Loop(cst.CSTTransformer):
    """Puts a script's own loop on tp: objects are prepared where they are made, and backward is tp's."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.tp = next(name for name in ("tp", "tp_", "_tp") if name not in facts.names)
        self._models = facts.models
        self._ranks: set[str] = (
            {"rank", "gpu", "gpu_id", "local_rank", "gpu_ids"} if facts.is_parallel else set()
        )
        self._samplers: dict[str, bool] = {}  # names of distributed samplers, and whether they shuffle
        self._functions: list[str] = []
        self._notes: list[str] = []  # comments for the present statement
        self._after: list[str] = []  # statements after it
        self._removed = False
        self._said: set[str] = set()

    # -- statements -----------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        self._functions.pop()
        return updated_node

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._notes, self._after, self._removed = [], [], False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        comments = [cst.EmptyLine(comment=cst.Comment(f"# tp: {note}")) for note in self._notes]
        if self._removed:
            return cst.RemoveFromParent()
        if comments:
            updated_node = updated_node.with_changes(leading_lines=[*updated_node.leading_lines, *comments])
        if not self._after:
            return updated_node
        return cst.FlattenSentinel([updated_node, *(cst.parse_statement(line) for line in self._after)])

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._notes.append(text)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Any:
        target = updated_node.targets[0].target
        name, value = _name_of(target), updated_node.value
        last = name.rpartition(".")[2]
        if name and _name_of(value) == name:  # what wrapped it is gone
            self._removed = True
        if _makes_sampler(value):
            self._samplers[last] = _shuffles(value)
            # Not removed: the script may ask whether it is None.
            return updated_node.with_changes(value=_expression("None"))
        if last == "device" and _names_accelerators(value):
            return updated_node.with_changes(value=_expression(f"{self.tp}.device"))
        for variable in _OF_RANKS:
            if f"[{variable!r}]" in _code(value).replace('"', "'"):
                if variable != "WORLD_SIZE":
                    self._ranks.add(last)
                return updated_node.with_changes(value=_expression(f"{self.tp}.{_SINGLE[variable]}"))
        if m.matches(value, m.Call(func=m.Attribute(attr=m.Name("device_count")))):
            return updated_node.with_changes(value=_expression(f"{self.tp}.world_size"))
        if isinstance(value, cst.Call):
            if (model := _model_of(value)) is not None and name:
                self._after.append(f"{model}, {_code(target)} = {self.tp}.prepare({model}, {_code(target)})")
                return updated_node
            if _name_of(value.func).rpartition(".")[2] == "DataLoader" and self._trains(last):
                return updated_node.with_changes(value=_expression(f"{self.tp}.prepare({_code(value)})"))
        return updated_node

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> Any:
        value = updated_node.value
        if (
            isinstance(value, cst.Call)
            and _name_of(value.func).rpartition(".")[2] == "DataLoader"
            and self._functions
            and self._facts.makers.get(self._functions[-1], set()) & self._facts.training
        ):
            return updated_node.with_changes(value=_expression(f"{self.tp}.prepare({_code(value)})"))
        return updated_node

    def _trains(self, name: str) -> bool:
        """Return whether a loader of a name is trained on; the others each rank evaluates as a whole."""
        if name in self._facts.training or self._facts.loaders == 1:
            return True
        words = name.lower().split("_")
        if "train" in words:
            return True
        if not any(word.startswith(_HELD_BACK) for word in words):
            self._note(f"could not decide whether {name} is trained on; if so, {self.tp}.prepare({name})")
        return False

    # -- expressions ----------------------------------------------------------------------------------

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Any:
        value = updated_node.value
        if not isinstance(value, cst.Call):
            return updated_node
        name = _name_of(value.func)
        last = name.rpartition(".")[2]
        if last in _OF_TP:
            self._removed = True
        elif name in ("torch.save", "save") and not self._is_moved(value):
            return updated_node.with_changes(
                value=_expression(f"{_code(value)} if {self.tp}.is_main else None")
            )
        elif last == "spawn" and value.args:
            return updated_node.with_changes(value=self._called_here(value))
        return updated_node

    def _called_here(self, call: cst.Call) -> cst.BaseExpression:
        """Return the call of a spawned function, in a rank that ``tp launch`` has started."""
        function, given = _code(call.args[0].value), "()"
        for argument in call.args[1:]:
            if argument.keyword is None or argument.keyword.value == "args":
                given = _code(argument.value)
                break
        return _expression(f"{function}({self.tp}.rank, *{given})")

    @staticmethod
    def _is_moved(call: cst.Call) -> bool:
        return "is_main" in _code(call)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        function = updated_node.func
        name = _name_of(function)
        last = function.attr.value if isinstance(function, cst.Attribute) else name
        if isinstance(function, cst.Attribute):
            owner = _code(function.value)
            if last == "backward" and owner != self.tp:
                words = ", ".join([owner, *(_code(a).rstrip(", ") for a in updated_node.args)])
                return _expression(f"{self.tp}.backward({words})")
            if last in ("get_rank", "get_world_size") and not updated_node.args:
                return _expression(f"{self.tp}.{last.removeprefix('get_')}")
            if last == "state_dict" and owner.rpartition(".")[2] in self._models:
                return _expression(f"{self.tp}.session.model_state({owner})")
            if last == "load_state_dict" and owner.rpartition(".")[2] in self._models:
                state = _code(updated_node.args[0].value)
                return _expression(f"{self.tp}.session.load_model_state({owner}, {state})")
            if last == "to" and len(updated_node.args) == 1 and self._is_rank(updated_node.args[0].value):
                return _expression(f"{owner}.to({self.tp}.device)")
            if owner in self._models and last not in _MODULE_NAMES and "." not in owner:
                return updated_node.with_changes(
                    func=_expression(f"{self.tp}.session.unwrap({owner}).{last}")
                )
        if last in ("clip_grad_norm_", "clip_grad_norm"):
            return self._clipped(updated_node)
        if last in ("DDP", "DistributedDataParallel", "DataParallel") and updated_node.args:
            return updated_node.args[0].value
        if last == "DataLoader":
            return self._without_sampler(updated_node)
        return updated_node

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> Any:
        if self._facts.is_parallel and "cuda:{" in _code(updated_node)[:9]:
            return _expression(f"{self.tp}.device")
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        owner = _code(updated_node.value)
        if updated_node.attr.value == "module" and self._facts.is_parallel:
            return _expression(f"{self.tp}.session.unwrap({owner})")
        return updated_node

    def _is_rank(self, node: cst.BaseExpression) -> bool:
        return _name_of(node).rpartition(".")[2] in self._ranks

    def _clipped(self, call: cst.Call) -> cst.BaseExpression:
        model = _parameters_of(call.args[0].value) if call.args else None
        if model is not None and model.rpartition(".")[2] in self._models and len(call.args) == 2:
            return _expression(f"{self.tp}.clip_grad_norm({model}, {_code(call.args[1].value)})")
        return call

    def _without_sampler(self, call: cst.Call) -> cst.Call:
        """Return a loader without its DistributedSampler: tp splits the batches."""
        arguments, shuffles = [], None
        for argument in call.args:
            word, value = argument.keyword.value if argument.keyword else "", argument.value
            known = self._samplers.get(_name_of(value).rpartition(".")[2])
            if word == "sampler" and (known is not None or _makes_sampler(value)):
                shuffles = _shuffles(value) if known is None else known
                self._note("batch_size is now the batch size of all ranks together")
            else:
                arguments.append(argument)
        if shuffles is None:
            return call
        arguments = [a for a in arguments if not (a.keyword and a.keyword.value == "shuffle")]
        order = cst.Arg(_expression(str(shuffles)), keyword=cst.Name("shuffle"), equal=_tight())
        arguments = [*(a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in arguments), order]
        one_line = call.with_changes(args=arguments, whitespace_before_args=cst.SimpleWhitespace(""))
        return cst.ensure_type(_expression(_code(one_line)), cst.Call)


def _makes_sampler(value: cst.BaseExpression) -> bool:
    """Return whether a value is a DistributedSampler, or may be."""
    if isinstance(value, cst.IfExp):
        return _makes_sampler(value.body) or _makes_sampler(value.orelse)
    return isinstance(value, cst.Call) and _name_of(value.func).rpartition(".")[2] == "DistributedSampler"


def _shuffles(sampler: cst.BaseExpression) -> bool:
    return "shuffle=False" not in _code(sampler).replace(" ", "")


def _tight() -> cst.AssignEqual:
    nothing = cst.SimpleWhitespace("")
    return cst.AssignEqual(whitespace_before=nothing, whitespace_after=nothing)


def _names_accelerators(value: cst.BaseExpression) -> bool:
    text = _code(value)
    return any(word in text for word in ("cuda", "torch.device", "accelerator", "mps", "xpu"))


def _parameters_of(value: cst.BaseExpression) -> str | None:
    """Return the model of ``model.parameters()``, in whatever stands around it."""
    found = m.findall(
        value, m.Call(func=m.Attribute(attr=m.OneOf(m.Name("parameters"), m.Name("named_parameters"))))
    )
    for call in found:
        owner = (
            _name_of(call.func.value)
            if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)
            else ""
        )
        if owner:
            return owner
    return None


def _model_of(call: cst.Call) -> str | None:
    """Return the model that gives an optimizer's constructor its parameters, or ``None``."""
    owner, _, name = _name_of(call.func).rpartition(".")
    if name == "configure_optimizers" and owner:
        return owner
    if not name or name[0].islower() or not call.args:
        return None
    return next((model for a in call.args if (model := _parameters_of(a.value)) is not None), None)
