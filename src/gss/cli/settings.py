"""`gss settings`: every setting of a training run, said once, in the configs; and what a shell completes."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from typer import Argument


class Setting(NamedTuple):
    """A setting as a user meets it."""

    name: str
    """Dotted, as `--set` takes it."""
    kind: str
    default: str
    about: str


def settings() -> Iterator[Setting]:
    """All of them, from the config classes and the text under each field there."""
    from gss.training.config import TrainConfig

    return _described(TrainConfig(), "")


def _described(config: Any, prefix: str) -> Iterator[Setting]:
    texts = _field_texts(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _described(value, f"{prefix}{field.name}.")
        else:
            default = json.dumps(value) if value is not None else "none"
            yield Setting(prefix + field.name, _kind(field), default, texts.get(field.name, ""))


def _kind(field: Field[Any]) -> str:
    """A field's type as a user reads it: its choices, where there are some."""
    from gss.choices import choices_of

    kind = field.type
    if choices := choices_of(field, kind):
        return " | ".join(map(str, choices)) + (", …" if get_origin(kind) is tuple else "")
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _field_texts(kind: type) -> dict[str, str]:
    """The text under each field of a class, which Python itself forgets."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: `name=` of the settings that begin like this, each with its line."""
    return [(f"{each.name}=", _line(each.about)) for each in settings() if each.name.startswith(incomplete)]


def complete_name(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: names of settings."""
    return [(name.removesuffix("="), about) for name, about in complete_setting(incomplete)]


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: presets."""
    from gss.presets import PRESETS

    return [(name, preset.about) for name, preset in PRESETS.items() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """For a shell: recipes."""
    from gss.recipes import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def settings_command(
    name: Annotated[
        str | None, Argument(help="A setting, or a group such as `optimizer`.", autocompletion=complete_name)
    ] = None,
) -> None:
    """List the settings that `gss train --set` and recipes take: type, default, and what each is."""
    from rich.console import Console
    from rich.markup import escape

    from gss.choices import nearest

    every = list(settings())
    chosen = [each for each in every if name is None or each.name == name or each.name.startswith(f"{name}.")]
    if not chosen:
        raise ValueError(f"there is no setting {name!r}{nearest(str(name), [each.name for each in every])}")
    console = Console(highlight=False, soft_wrap=True)
    for each in chosen:
        about = each.about if len(chosen) == 1 else _line(each.about)
        console.print(f"[bold]{each.name}[/] [dim]{escape(each.kind)} = {escape(each.default)}[/]\n    {escape(about)}")


def _line(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].removesuffix(".") + "."
