"""The paper's tables and figures, one file each: what `nofuss reproduce` runs.

    published    the paper's numbers
    sources      data sets, and budgets: how long to train
    trials       one training: its settings and its result
    runner       runs trials and keeps their results, chooses rates
    reproduce    which experiments on which data; results.json
    page         tables, figures, verdicts; results.json → report.html

An experiment is a function of a `Runner` that returns an `Entry`: tables, convergence,
proxies_per_label (fractional, dynamic), batch_size, bounds, retrieval.
"""
