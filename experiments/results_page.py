"""Makes the tables, answers and figures of docs/results.md and README.md from kept results.

    python -m experiments.results_page [RESULTS] [--page docs/results.md --page README.md] [--scale small]

RESULTS holds OUT/results/*.json of any number of calls of `gss reproduce`; the default is benchmarks/results/reproduce.
The best recipe's tables come from benchmarks/results/quality, recall from benchmarks/results/probe. What is between
markers in the pages is replaced, the prose around it stays, and figures go to docs/images. Missing runs are dashes, and
are listed at the end.
"""

import argparse
from pathlib import Path

from experiments.page import write_page

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "benchmarks" / "results" / "reproduce")
    parser.add_argument("--page", type=Path, action="append", help="default: docs/results.md and README.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--scale", default="small")
    arguments = parser.parse_args()
    pages = arguments.page or [ROOT / "docs" / "results.md", ROOT / "README.md"]
    missing = write_page(arguments.results, pages, arguments.images, arguments.scale)
    print(f"filled {', '.join(map(str, pages))}")
    for line in missing:
        print(f"missing: {line}")


if __name__ == "__main__":
    main()
