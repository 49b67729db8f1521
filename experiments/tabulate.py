"""Result files as tables: read JSON by pattern, pick columns by dotted names, print Markdown.

python -m experiments.tabulate 'benchmarks/results/reproduce/*.json' corpus label seed lengths.4096.perplexity
"""

import argparse
import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gss.reproduce.tables import NONE, markdown

Record = Mapping[str, Any]


def load_results(pattern: str | Path) -> list[dict[str, Any]]:
    """What the JSON files that match a pattern hold, by name, each with its `path`; a folder means all files in it."""
    place = str(Path(pattern) / "*.json") if Path(pattern).is_dir() else str(pattern)
    paths = sorted(glob.glob(place))
    if not paths:
        raise ValueError(f"no result files match {place}")
    return [{"path": path, **json.loads(Path(path).read_text(encoding="utf-8"))} for path in paths]


def value(record: Record, name: str) -> Any:
    """The value of a dotted name (`lengths.4096.perplexity`); None where there is none."""
    found: Any = record
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def table(records: Sequence[Record], columns: Mapping[str, str] | Sequence[str], digits: int = 2) -> str:
    """A Markdown table with a row per record; `columns` maps a header to a dotted name, or lists names."""
    named = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    rows = [[_cell(value(record, name), digits) for name in named.values()] for record in records]
    words = {
        header for header, name in named.items() if any(isinstance(value(record, name), str) for record in records)
    }
    return markdown([*named], rows, frozenset(words))


def _cell(found: Any, digits: int) -> str:
    if found is None:
        return NONE
    if isinstance(found, float):
        return f"{found:,.{digits}f}"
    return f"{found:,}" if isinstance(found, int) and not isinstance(found, bool) else str(found)


def main() -> None:
    """Print a table of result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern")
    parser.add_argument("columns", nargs="+", help="dotted names of what the files hold")
    parser.add_argument("--digits", type=int, default=2)
    arguments = parser.parse_args()
    print(table(load_results(arguments.pattern), arguments.columns, arguments.digits))


if __name__ == "__main__":
    main()
