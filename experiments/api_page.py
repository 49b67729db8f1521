"""Writes docs/api.md from the docstrings of the public names of `import gss`: python experiments/api_page.py

tests/test_api.py runs every example and checks that the page is current.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gss

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
GROUPS = {
    "Trained models": ("load", "LM", "Score", "save_state", "load_state"),
    "Training and evaluation": ("train", "TrainConfig", "TrainResult", "evaluate", "Evaluation"),
    "Models": ("PRESETS", "preset", "build_model", "LanguageModel", "ModelState"),
    "Configurations": ("ModelConfig", "StateSpaceConfig", "AttentionConfig"),
}
INTRODUCTION = """# The library

This page documents every public name of `import gss`: how to load and use models, train, evaluate, and build your own.

```python
import gss

print(gss.load().generate("It was a dark", max_tokens=20))
```

In the examples below, `run` is a run folder, `corpus` a prepared corpus, `folder` a new folder, and `tokens` are ids,
[batch, length]. (`python experiments/api_page.py` generates this page from the docstrings.)
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page."""
    assert {name for names in GROUPS.values() for name in names} == set(gss.__all__)
    parts = [INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [part for name in names for part in _entry(name)]
    return "\n".join(parts)


def _entry(name: str) -> Iterator[str]:
    value = getattr(gss, name)
    if not callable(value):
        yield f"### gss.{name}\n"
        yield f"The {len(value)} presets by name: {', '.join(f'`{key}`' for key in value)}.\n"
        return
    node = _node(value)
    if isinstance(node, Function):
        yield f"### gss.{name}\n"
        yield from _callable(f"gss.{name}", node)
        return
    yield f"### gss.{name}\n"
    yield _prose(ast.get_docstring(node) or "")
    fields = list(_fields(node))
    if fields:
        yield "| field | | |\n|---|---|---|"
        yield "\n".join(f"| `{field}` | `{kind}` | {about} |" for field, kind, about in fields) + "\n"
    for member in node.body:
        if isinstance(member, Function) and not member.name.startswith("_") and ast.get_docstring(member):
            yield f"#### {name}.{member.name}\n"
            yield from _callable(f"{name.lower() if name == 'LM' else name}.{member.name}", member)


def _node(value: Any) -> ast.ClassDef | Function:
    """The syntax of a class or function, where it is defined."""
    tree = ast.parse(Path(inspect.getsourcefile(value) or "").read_text(encoding="utf-8"))
    found = [node for node in tree.body if getattr(node, "name", None) == value.__name__]
    assert isinstance(found[-1], ast.ClassDef | Function)
    return found[-1]


def _callable(name: str, node: Function) -> Iterator[str]:
    """The signature, unless it is a property, and the docstring."""
    if not any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if isinstance(argument.annotation, ast.Constant):  # a type in quotes
                argument.annotation = ast.Name(str(argument.annotation.value))
        arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"{name}({arguments}){result}".replace("'", '"')
        wrapped = textwrap.wrap(signature, 100, subsequent_indent="    ", break_long_words=False)
        yield "```\n" + "\n".join(wrapped) + "\n```\n"
    yield _prose(ast.get_docstring(node) or "")


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type and default, and meaning of a class's fields that have a docstring."""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            about = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                about = " ".join(str(after.value.value).split())
            given = field.value
            if isinstance(given, ast.Call) and ast.unparse(given.func) == "limited":
                given = given.args[0]  # the default; the rest are its limits
            default = "" if given is None else f" = {ast.unparse(given)}"
            if "default_factory" in default:
                default = ""
            kind = f"{ast.unparse(field.annotation)}{default}".replace("|", "\\|").replace("'", '"')
            yield field.target.id, kind, about.replace("|", "\\|")


def _prose(text: str) -> str:
    """A docstring as Markdown: examples in code blocks, aligned descriptions of arguments as a list."""
    lines: list[str] = []
    code = False
    for line in text.splitlines():
        argument = re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if line.startswith(">>>") and not code:
            lines.append("```python")
            code = True
        elif code and not line.strip():
            lines.append("```")
            code = False
        if argument and not code:
            line = f"- `{argument[1]}`: {argument[2]}"
        elif not code and re.match(r" {10,}\S", line):
            line = f"  {line.strip()}"
        lines.append(line)
    return "\n".join([*lines, *(["```"] if code else [])]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
