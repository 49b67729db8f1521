"""Files that are never half-written under their names, and JSON that every reader takes."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_file(path: Path, content: str | bytes) -> None:
    """Write aside and rename: a reader finds the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no NaN and no infinity: null in their places."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
