"""The paper's tables and figures, one file each: what `nofuss reproduce` runs.

sources (data sets) + budgets (how long to train) → trials (one training each, stored by the lab)
rates (chosen on held-out training classes) → an experiment's trials → its entry in results.json
statistics, published (the paper's numbers) → verdicts → report.html

Experiments: tables, convergence, proxies_per_label (fractional, dynamic), batch_size (both use
sweep), bounds, retrieval.
"""
