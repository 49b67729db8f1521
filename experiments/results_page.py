"""Makes the tables and figures of docs/results.md, docs/results-all-runs.md and README.md from kept results.

    python -m experiments.results_page [RESULTS]

RESULTS holds results of `gss reproduce`: NAME.json files, or its run folders (default: benchmarks/results/reproduce).
Those of `experiments.quality` and of `experiments.recall` come from benchmarks/results/quality and probe. The text
between the markers of the pages is replaced, and figures go to docs/images.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from experiments import best_recipe, paper_recipe, plots, quality, recall
from experiments.page import fill
from gss.io.files import write_file

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / name for name in ("docs/results.md", "docs/results-all-runs.md", "README.md"))
IMAGES = ROOT / "docs" / "images"


def parts(results: Path = paper_recipe.RESULTS, best: Path = best_recipe.RESULTS) -> dict[str, Callable[[], str]]:
    """Every part that a page can ask for, by name."""
    runs = paper_recipe.read(results)
    plan = Path(quality.__file__).with_name("quality.plan").read_text(encoding="utf-8")
    found: dict[str, Callable[[], str]] = {
        "summary": lambda: f"{best_recipe.summary(best)}\n\n{paper_recipe.summary(runs)}",
        "best-recipe": lambda: best_recipe.table(best_recipe.corpora(best), best=True),
        "all-settings": lambda: best_recipe.table(best_recipe.corpora(best)),
        "legend": lambda: best_recipe.legend(best),
        "best-every": lambda: best_recipe.every(best),
        "best-sources": lambda: best_recipe.sources(best),
        "to-come": lambda: best_recipe.to_come([line[:2] for line in quality.parsed(plan)], best),
        "context": lambda: best_recipe.context(best_recipe.shown(best)),
        "context-all": lambda: best_recipe.context(list(best_recipe.probed(best)), full=True),
        "recall": recall.table,
    }
    named = ("models", "pairs", "lengths", "rates", "starts", "vocabularies", "every", "sources")
    return found | {name: lambda name=name: getattr(paper_recipe, name)(runs) for name in named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=paper_recipe.RESULTS)
    results = parser.parse_args().results
    for name, picture in plots.draw(paper_recipe.read(results), best_recipe.RESULTS).items():
        write_file(IMAGES / f"results-{name}.png", picture)
    found = parts(results)
    for page in PAGES:
        write_file(page, fill(page.read_text(encoding="utf-8"), found))
        print(f"filled {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
