"""The public names of a package as text: what users import, call, subclass and catch."""

import ast
import collections
import dataclasses
import enum
import functools
import importlib
import inspect
import pkgutil
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

__all__ = ["PACKAGES", "package_text", "public_modules"]

PACKAGES = (
    "tp_accelerate",
    "tp_context",
    "tp_core",
    "tp_data",
    "tp_dp_gather",
    "tp_launch",
    "tp_lightning",
    "tp_pipeline",
    "tp_ray",
    "tp_runner",
    "tp_shard",
    "tp_simulator",
    "tp_testing",
    "tp_trainer",
    "tp_tuple",
    "tp_verify",
)
# What a class answers to without being called by name; others, as a dataclass's __eq__, are left out.
PROTOCOL = {"__call__", "__contains__", "__delitem__", "__enter__", "__exit__", "__getattr__", "__getitem__"}
PROTOCOL |= {
    "__iter__",
    "__len__",
    "__next__",
    "__setitem__",
    "__aenter__",
    "__aexit__",
    "__aiter__",
    "__anext__",
}
WIDTH = 110


def package_text(package):
    """Return the text of all public modules of a package."""
    return "\n".join(_module_text(module) for module in public_modules(package))


def public_modules(package):
    """Return the public modules, the package first; those in `templates` are packages of others."""
    found, queue = [], [package]
    while queue:
        module = importlib.import_module(queue.pop(0))
        found.append(module)
        below = pkgutil.iter_modules(getattr(module, "__path__", ()))
        queue += [f"{module.__name__}.{m.name}" for m in below if m.name[0] != "_" and m.name != "templates"]
    return sorted(found, key=lambda module: module.__name__)


def _names(module):
    """Return the names in `__all__`, and further ones that are imported at first use, as `tp_runner.map`."""
    names = set(getattr(module, "__all__", ()))
    if "__dir__" in vars(module):
        stem = module.__name__.split(".")[0]
        for name in dir(module):
            kept = getattr(module, name) if name[:2] != "__" else None
            if getattr(kept, "__module__", stem).split(".")[0] != stem or isinstance(kept, ModuleType):
                continue
            names |= {name} - {"TYPE_CHECKING", "lazy_exports"} if name[:2] != "__" else set()
    return sorted(names)


@functools.cache
def _homes():
    """Return the public name of each class and function, by which others refer to it: the shallowest."""
    homes = {}
    for package in PACKAGES:
        for module in sorted(public_modules(package), key=lambda m: (m.__name__.count("."), m.__name__)):
            for name in _names(module):
                value = getattr(module, name)
                if inspect.isclass(value) or inspect.isroutine(value):
                    homes.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return homes


def _module_text(module):
    lines = [f"{module.__name__}"]
    hidden = []
    for name in _names(module):
        lines += [f"    {line}" for line in _entry(module, name)]
        hidden += [name] if name not in getattr(module, "__all__", ()) else []
    if hidden:
        lines.append(f"    (not in __all__: {', '.join(hidden)})")
    return "\n".join(lines) + "\n"


def _entry(module, name):
    value = getattr(module, name)
    home = _homes().get(id(value), (f"{module.__name__}.{name}", value))[0]
    if home != f"{module.__name__}.{name}":
        return [f"{name} = {home}"]
    if isinstance(value, ModuleType):
        return [f"module {name}"]
    if inspect.isclass(value):
        return _class(name, value)
    if inspect.isroutine(value):
        return _call(f"def {name}", value)
    if type(value).__module__ in {"types", "typing"}:  # their names are others with each Python
        return [f"{name}: alias"]
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return [f"{name}: {type(value).__name__}{f' = {value!r}' if plain else ''}"]


class _Unquoted(ast.NodeTransformer):
    """Takes the quotes off annotations: where they stand says when a name is imported, no more."""

    def visit_Subscript(self, node):
        return node if ast.unparse(node.value).endswith("Literal") else self.generic_visit(node)

    def visit_Constant(self, node):
        with suppress(SyntaxError):
            return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node
        return node


def _annotation(node):
    """Return an annotation as it stands in the source: evaluated, it would name private modules."""
    return "" if node is None else ast.unparse(_Unquoted().visit(node))


@functools.cache
def _definitions(path):
    """Return the classes and functions that a file defines, by their qualified names."""
    found = collections.defaultdict(list)

    def look(node, above):
        for below in ast.iter_child_nodes(node):
            is_definition = isinstance(below, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if is_definition:
                found[above + below.name].append(below)
            look(below, f"{above}{below.name}." if is_definition else above)

    look(ast.parse(Path(path).read_text()), "")
    return found


def _tree(value):
    """Return the definition of a class or function of ours; None for others, and those made on the fly."""
    if not getattr(value, "__module__", "").startswith("tp_"):
        return None
    code = getattr(value, "__code__", None)
    path = code.co_filename if code else sys.modules[value.__module__].__file__
    found = _definitions(path)[value.__qualname__] if Path(path).is_file() else []
    lines = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in found]
    wanted = code.co_firstlineno if code else lines[-1] if lines else 0
    return next((node for node, line in zip(found, lines, strict=True) if line == wanted), None)


def _default(value):
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (bool, int, float, str, bytes, tuple, type(None), frozenset)):
        return repr(value)
    return getattr(value, "__name__", f"<{type(value).__name__}>")


def _call(head, function, *, bound=False):
    """Return the lines of a signature: one, or one for each parameter where that would be too long."""
    function = inspect.unwrap(function)
    tree = _tree(function)
    notes, returned = {}, ""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = tree.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        notes = {a.arg: _annotation(a.annotation) for a in [*given, arguments.vararg, arguments.kwarg] if a}
        returned = _annotation(tree.returns)
        head = f"async {head}" if isinstance(tree, ast.AsyncFunctionDef) else head
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):
        return [f"{head}(...)"]
    parts, previous = [], None
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and previous not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            parts.append("*")
        if previous is inspect.Parameter.POSITIONAL_ONLY and p.kind is not previous:
            parts.append("/")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {_default(p.default)}"
        parts.append(f"{star}{p.name}{f': {note}' if (note := notes.get(p.name)) else ''}{default}")
        previous = p.kind
    if previous is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    end = f" -> {returned}" if returned else ""
    line = f"{head}({', '.join(parts)}){end}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{head}(", *(f"    {part}," for part in parts), f"){end}"]


def _is_private(cls):
    return cls.__module__.startswith("tp_") and id(cls) not in _homes()


def _bases(cls):
    """Return the bases that users know; private ones are ways to cut a class into files."""
    for base in cls.__bases__:
        if _is_private(base):
            yield from _bases(base)
        elif base is not object:
            yield _homes()[id(base)][0] if id(base) in _homes() else base.__name__


def _class(name, cls):
    bases = ", ".join(dict.fromkeys(_bases(cls)))
    own = [c for c in cls.__mro__ if c is cls or _is_private(c)]
    kind = "exception" if issubclass(cls, BaseException) else "class"
    lines = [f"{kind} {name}({bases})" if bases else f"{kind} {name}"]
    lines += [f"    {line}" for line in [*_construction(cls, own), *_members(cls, own)]]
    return lines


def _annotations(cls):
    fields = [node for node in getattr(_tree(cls), "body", ()) if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): _annotation(node.annotation) for node in fields}


def _construction(cls, own):
    if issubclass(cls, enum.Enum):
        return [f"{member.name} = {member.value!r}" for member in cls]
    notes = {}
    # The bases of a TypedDict stand in its source alone.
    bases = [ast.unparse(base) for base in getattr(_tree(cls), "bases", ())]
    written = [getattr(sys.modules[cls.__module__], base, None) for base in bases]
    for part in reversed([*cls.__mro__, *written]):
        notes |= _annotations(part)
    if hasattr(cls, "__total__"):  # a TypedDict
        keys = [(key, "" if key in cls.__required_keys__ else "optional ") for key in cls.__annotations__]
        return [f"{optional}key {key}: {notes.get(key, '?')}" for key, optional in keys]
    if dataclasses.is_dataclass(cls):
        lines = [f"dataclass{', frozen' if cls.__dataclass_params__.frozen else ''}"]
        for f in dataclasses.fields(cls):
            default = "" if f.default is dataclasses.MISSING else f" = {_default(f.default)}"
            if f.default_factory is not dataclasses.MISSING:
                default = f" = {_default(f.default_factory)}()"
            kind = "" if f.init else "computed "
            kind += "keyword-only " if f.kw_only else ""
            lines += [f"{kind}field {f.name}: {notes.get(f.name, '?')}{default}"] * (f.name[0] != "_")
        return lines
    if hasattr(cls, "_fields"):
        defaults = {name: f" = {_default(value)}" for name, value in cls._field_defaults.items()}
        return [f"tuple field {n}: {notes.get(n, '?')}{defaults.get(n, '')}" for n in cls._fields]
    init = next((vars(c)["__init__"] for c in own if "__init__" in vars(c)), None)
    lines = [] if init is None or init.__module__ == "typing" else _call("", init, bound=True)
    assigned = {name for part in own for name in _annotations(part)}
    for part in own:
        for node in ast.walk(_tree(part) or ast.Pass()):
            targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
            assigned |= {
                t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"
            }
    attributes = sorted(a for a in assigned if a[0] != "_" and not any(a in vars(c) for c in own))
    return lines + ([f"attributes: {', '.join(attributes)}"] if attributes else [])


def _members(cls, own):
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    fields |= set(getattr(cls, "_fields", ())) | set(getattr(cls, "__members__", ()))
    names = {n for c in own for n in vars(c) if n[0] != "_" or n in PROTOCOL} - fields
    if hasattr(cls, "_fields"):
        names -= set(dir(tuple))
    for name in sorted(names):
        value = next(vars(c)[name] for c in own if name in vars(c))
        abstract = "abstract " if name in getattr(cls, "__abstractmethods__", ()) else ""
        if isinstance(value, (property, functools.cached_property)):
            getter = value.fget if isinstance(value, property) else value.func
            settable = " (settable)" if getattr(value, "fset", None) else ""
            returned = _annotation(getattr(_tree(inspect.unwrap(getter)), "returns", None))
            yield f"{abstract}property {name} -> {returned}{settable}"
        elif isinstance(value, (classmethod, staticmethod)):
            bound = isinstance(value, classmethod)
            yield from _call(f"{abstract}{type(value).__name__} {name}", value.__func__, bound=bound)
        elif inspect.isroutine(value):
            yield from _call(f"{abstract}def {name}", value, bound=True)
        elif inspect.isclass(value):
            yield f"class {name}"
        else:
            yield f"{name}: {type(value).__name__}"
