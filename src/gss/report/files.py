"""Files that are never half-written under their names."""

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write aside and rename."""
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
