"""The report of a run: tables, figures, one self-contained page."""

from nofuss.report.page import read_json, write_report

__all__ = ["read_json", "write_report"]
