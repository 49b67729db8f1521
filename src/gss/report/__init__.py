"""Reports on runs: one HTML file from what is in the run folders.

runs (folders, held-out scores) -> figures -> page (tables, HTML); theme has the looks
"""

from gss.report.page import write_report

__all__ = ["write_report"]
