"""Measurements: each module checks its subject, times it beside peers in one run and returns rows.

`results` has the rows, the header above them and the table; `ceilings` what the machine itself can do.
"""
