"""The table of parsers to fuzz."""

from functools import partial

from torture import fuzz_data, fuzz_runs, fuzz_small
from torture.fuzz import Prepare

TARGETS: dict[str, Prepare] = {
    "pictures": fuzz_data.pictures,
    "tables": fuzz_data.tables,
    "arrays": fuzz_data.arrays,
    "CUB": partial(fuzz_data.benchmarks, layout=fuzz_data.CUB),
    "products": partial(fuzz_data.benchmarks, layout=fuzz_data.PRODUCTS),
    "corrections": fuzz_small.corrections,
    "feedback": fuzz_small.feedback,
    "locks": fuzz_small.locks,
    "weights": fuzz_small.weights,
    "filters": fuzz_small.filters,
    "addresses": fuzz_small.addresses,
    "runs": fuzz_runs.runs,
    "requests": fuzz_runs.requests,
}
