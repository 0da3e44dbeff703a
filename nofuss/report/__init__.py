"""The report of a run: tables, figures, one self-contained page."""

from nofuss.report.report import foreign, read_optional_json, render, write_report

__all__ = ["foreign", "read_optional_json", "render", "write_report"]
