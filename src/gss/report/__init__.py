"""Reports on runs: one HTML file, or Markdown with pictures, from what is in the run folders.

run (a folder) -> scores, memory (numbers) -> curves, spectra (figures), compare (tables) -> build -> page, markdown
"""

from gss.report.build import write_report

__all__ = ["write_report"]
