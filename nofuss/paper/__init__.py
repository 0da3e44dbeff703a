"""What `nofuss reproduce` runs: the paper's tables and figures, one file each.

sources (data at hand) + budgets (how much to spend) → trials (one training each, kept on disk)
rates (tries on held-out training classes) → an experiment's trials → its entry in results.json
statistics, published (the paper's numbers) → verdicts → report.html
"""
