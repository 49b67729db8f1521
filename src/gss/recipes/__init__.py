"""Recipes: settings of training runs as TOML files, by name. Imports no torch."""

from pathlib import Path
from typing import Any

from gss.choices import nearest
from gss.config import read_toml


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe; ValueError lists the recipes where there is none of that name."""
    path = Path(__file__).with_name(f"{name}.toml")
    if not path.is_file():
        raise ValueError(f"there is no recipe {name!r}{nearest(name, recipe_names())}")
    return path


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """The settings of a recipe, by its name or its file, as plain data."""
    named = not (Path(recipe).suffix or Path(recipe).is_file())
    return read_toml(recipe_path(str(recipe)) if named else recipe)
