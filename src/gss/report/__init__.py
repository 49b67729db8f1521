"""Reports on runs: one HTML file, or Markdown with pictures, from what is in the run folders.

runs (folders), scores (held-out) -> curves, spectra (figures as data), tables -> build -> page (HTML), markdown
"""

from gss.report.build import write_report

__all__ = ["write_report"]
