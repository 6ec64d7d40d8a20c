"""The C++ extension: compiled at first use by the compiler that is there, and kept for later processes."""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from tp_simulator.errors import BuildError

NAME = "tp_simulator_native"
SOURCES = Path(__file__).parent / "csrc"
# -O1: the kernels are torch's own and compiled already; more takes longer and gains nothing.
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


@cache
def extension() -> ModuleType:
    """Return the extension for this torch and this Python, compiling it if nobody has yet.

    Raises:
        BuildError: This is not Linux, there is no compiler or no header of Python, or the compiler failed.
    """
    if sys.platform != "linux":
        msg = f"tp-simulator reserves addresses as Linux does it, and cannot run on {sys.platform}"
        raise BuildError(msg)
    path = _cache_folder() / _key() / f"{NAME}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent / "lock"):
            if not path.exists():  # another process may have built it while this one waited
                _compile(path)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None  # noqa: S101 - with a loader there is one
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tp-simulator"


def _key() -> str:
    """Return a name of what the extension is made of and for: sources, flags, torch, Python."""
    import torch

    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    words = (*FLAGS, torch.__version__, str(sysconfig.get_config_var("SOABI")), platform.machine())
    digest.update(" ".join(words).encode())
    return f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one process at a time in: the ranks of a job come together."""
    import fcntl  # Windows has none, where torch imports this package, too

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with the process, however that ends
        yield


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    if asked:
        missing = f"the compiler that CXX names, {asked!r}, is not here"
    else:
        missing = "there is no C++ compiler here"
    msg = (
        f"tp-simulator compiles a small extension at first use, and {missing}. Install one "
        "(`apt install g++`, `dnf install gcc-c++`, `conda install cxx-compiler`), or name yours in CXX."
    )
    raise BuildError(msg)


def _compile(path: Path) -> None:
    import torch

    compiler = _compiler()
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        msg = (
            f"tp-simulator compiles an extension at first use, and the headers of Python are not in {python}."
            " Install them (`apt install python3-dev`, `dnf install python3-devel`)."
        )
        raise BuildError(msg)
    home = Path(torch.__file__).parent
    print(
        f"tp-simulator: compiling its extension for torch {torch.__version__}, once, in a minute or two",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [
            "-isystem",
            str(home / "include"),
            "-isystem",
            str(home / "include/torch/csrc/api/include"),
        ]
        command += ["-isystem", str(python), str(SOURCES / "module.cpp"), "-o", str(made)]
        command += [
            "-L",
            str(home / "lib"),
            f"-Wl,-rpath,{home / 'lib'}",
            *(f"-l{name}" for name in LIBRARIES),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            end = "\n".join(done.stderr.splitlines()[-30:])
            msg = f"tp-simulator could not compile its extension: {' '.join(command)} failed with\n{end}"
            raise BuildError(msg)
        made.replace(path)  # whole, or not at all
