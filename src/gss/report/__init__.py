"""Reports on runs: one HTML file from what is in the run folders.

runs (folders), scores (held-out) -> curves, spectra (figures as data), tables -> build -> page (HTML)
"""

from gss.report.build import write_report

__all__ = ["write_report"]
