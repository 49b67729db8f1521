"""The architecture: imports go downward only, without cycles, and the command answers before torch is loaded."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gss

SOURCE = Path(gss.__file__).parent
# What each part of the package may import from the package besides itself, inside functions too. A part is a module,
# or a folder with what no part of a longer name takes out of it. A part stands after those that it may import.
_MODEL = "config ops nn model"
_RUN = f"gss {_MODEL} sampling precision io io.files data decode generate scoring lm evaluation"
_IMPORTS = {
    "choices": "",
    "config": "choices",
    "presets": "choices config",
    "gss": "config presets",  # the module itself; and by name, on first use, what `gss.__all__` lists
    "recipes": "choices config",
    "paper": "",
    "sampling": "choices",
    "box": "",
    "ops": "choices",
    "nn": "ops config choices",
    "model": "nn ops config choices",
    "precision": "model ops",
    "loss": "ops",
    "pieces": "model nn loss",
    "accounting": "model nn config",
    "io.files": "",
    "io": "io.files model nn config",
    "data": "io.files",
    "decode": "model nn ops precision sampling",
    "generate": "model nn data precision decode",
    "scoring": "model nn",
    "lm": "accounting choices model ops nn sampling data precision generate io io.files scoring box",
    "evaluation": "model nn data precision scoring lm paper",
    "training": "gss config nn model precision io io.files data generate lm evaluation "
    "choices pieces accounting presets recipes",
    "probe": "config nn model data precision scoring lm evaluation training",
    "hf": "config nn model loss data io io.files lm",
    "export": "accounting nn model ops data io.files lm",
    "lm_eval": "model sampling data generate scoring lm",
    "serve": f"gss {_MODEL} accounting sampling precision io.files data decode generate lm",
    "report": f"{_RUN} accounting paper training",
    "bench": f"{_RUN} accounting loss presets training",
    "reproduce": f"{_RUN} accounting paper recipes training report bench",
    "cli": f"{_RUN} accounting bench box choices export hf paper presets probe recipes report reproduce serve training",
    "__main__": "cli",
}
ALLOWED = {name: set(allowed.split()) for name, allowed in _IMPORTS.items()}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below gss; a package is named like its folder."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part(module: str) -> str:
    """The longest part whose name a module's begins with."""
    names = [name for name in ALLOWED if f"{module}.".startswith(f"{name}.")]
    return max(names, key=len, default=module.partition(".")[0]) or "gss"


def imports(path: Path, at_import: bool = False) -> Iterator[str]:
    """The modules of the package that a file imports; only those needed to import it, if asked."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, below = name.partition(".")
            if top == "gss":
                yield below if below in modules() else below.rpartition(".")[0]


def test_parts_stand_above_what_they_import() -> None:
    names = list(ALLOWED)
    for name, allowed in ALLOWED.items():
        assert allowed <= set(names[: names.index(name)]), name


def test_imports_go_downward() -> None:
    assert len(modules()) > 15
    for module, path in modules().items():
        own = part(module)
        assert own in ALLOWED, f"{own} is a new part: say above what it may import"
        found = {part(name) for name in imports(path, at_import=not module)} - {own}
        assert found <= ALLOWED[own], f"{module} imports {found - ALLOWED[own]}"


def test_no_module_needs_itself() -> None:
    graph = {module: {name for name in imports(path, at_import=True) if name} for module, path in modules().items()}
    graph.pop("")  # needed by all, and needs only what needs nothing of it
    try:
        TopologicalSorter({module: needs - {module} for module, needs in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' → '.join(error.args[1])}")


def test_help_and_import_do_not_load_torch() -> None:
    script = "import sys, gss, gss.cli; gss.preset('gss'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_loading_a_model_needs_nothing_of_training() -> None:
    script = (
        "import sys, gss; from gss.accounting import account; account(gss.preset('gss2-small')); "
        "gss.load().generate(max_tokens=1); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "gss.lm" in loaded
    above = {"gss.training", "gss.evaluation", "gss.serve", "rich", "typer"}
    assert not (above | {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}) & loaded


POSIX_ONLY = """
import builtins, importlib, os, sys
import torch  # libraries have their own ways; ours are tried here
modules, real = ("fcntl", "resource", "termios", "pwd", "grp"), builtins.__import__
def imported(name, namespace=None, *more, **options):
    if name in modules and str((namespace or {}).get("__name__")).startswith("gss"):
        raise ImportError(name)
    return real(name, namespace, *more, **options)
builtins.__import__ = imported
for name in ("sched_getaffinity", "fork"):
    if hasattr(os, name):
        delattr(os, name)
for module in sys.argv[1:]:
    importlib.import_module(module)
from gss.data import usable_cores
assert usable_cores() == os.cpu_count()
"""


def test_modules_import_where_posix_is_not() -> None:
    """Everything but the GPU kernels runs on Windows, where a few modules and functions of Python's are missing.

    `hf` and `lm_eval`, which take long to import what they wrap, use none of these.
    """
    left_out = ("ops.gpu", "__main__", "hf", "lm_eval")
    names = [f"gss.{name}".rstrip(".") for name in modules() if not name.startswith(left_out)]
    done = subprocess.run([sys.executable, "-c", POSIX_ONLY, *names], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    assert all(getattr(gss, name) is not None for name in gss.__all__)
    assert set(gss.__all__) <= set(dir(gss))
    assert not hasattr(gss, "nothing")
