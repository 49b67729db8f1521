"""The architecture: imports go downward only, and the command answers before torch is loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import gss

SOURCE = Path(gss.__file__).parent
# What each part of the package may import from the package; a part not named here may import anything below the CLI.
ALLOWED = {
    "choices": set(),
    "config": {"choices"},
    "presets": {"config"},
    "paper": set(),
    "ops": {"ops", "choices"},
    "nn": {"nn", "ops", "config", "choices"},
    "model": {"nn", "ops", "config", "choices"},
    "data": {"data", "config", "io"},
    "loss": {"model", "nn", "ops", "config"},
    "accounting": {"model", "nn", "config"},
}


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("gss.")}
    return parts


def test_imports_go_downward() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 15
    for path in files:
        allowed = ALLOWED.get(part(path))
        if allowed is not None:
            assert imported(path) <= allowed, f"{path.relative_to(SOURCE)} imports {imported(path) - allowed}"
        if part(path) not in ("cli", "__main__"):
            assert "cli" not in imported(path), f"{path.relative_to(SOURCE)} imports the command line"


def test_help_and_import_do_not_load_torch() -> None:
    script = "import sys, gss, gss.cli; gss.preset('gss'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_public_names() -> None:
    assert all(getattr(gss, name) is not None for name in gss.__all__)
    assert not hasattr(gss, "nothing")
