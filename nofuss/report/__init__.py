"""The report of a run: tables, figures, one self-contained page."""

from nofuss.report.page import write_report

__all__ = ["write_report"]
