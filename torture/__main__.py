"""`python -m torture [--only CAMPAIGN …] [--seed N]`: what a run must survive, a table in the end.

Each campaign runs in a process of its own, several at once (--jobs). Exits with 1 if anything was
lost, unclear or late.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from torture import damage, disk, fuzz, kill, kill_index, page, runs, together
from torture.commands import Case

# The longest first, so that none is left alone at the end.
CAMPAIGNS: dict[str, Callable[[Path, int], Iterator[Case]]] = {
    "fuzz": fuzz.campaign,
    "disk": disk.campaign,
    "runs": runs.campaign,
    "kill": kill.campaign,
    "page": page.campaign,
    "damage": damage.campaign,
    "databases": kill_index.campaign,
    "together": together.campaign,
}


def main() -> int:
    """Run the campaigns that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument("--seed", type=int, default=0, help="seed of moments, damages and changes")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at once")
    options = parser.parse_args()
    if len(options.only) > 1:
        return at_once(options.only, options.jobs, options.seed)
    (name,) = options.only
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix=f"torture-{name}-") as home:
        for case in CAMPAIGNS[name](Path(home), options.seed):
            cases.append(case)
            for complaint in case.complaints:
                print(f"complaint: {case.name}: {complaint}", flush=True)
    refused = sum(case.refused for case in cases)
    complaints = sum(len(case.complaints) for case in cases)
    print(
        f"{name}: {len(cases)} cases, {refused} refused or noticed, "
        f"the longest {max((case.seconds for case in cases), default=0):.1f} s, "
        f"{complaints} complaints"
    )
    return 1 if complaints else 0


def at_once(names: list[str], jobs: int, seed: int) -> int:
    """Run campaigns in processes of their own; print what each says when it has ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # so that they do not wait for each other

    def run(name: str) -> tuple[str, int, str]:
        command = [sys.executable, "-m", "torture", "--only", name, "--seed", str(seed)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ended = subprocess.run(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        return name, ended.returncode, ended.stdout

    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, name) for name in names]):
            name, code, said = future.result()
            print(said.rstrip(), flush=True)
            failed += [name] if code else []
    print("nothing lost" if not failed else f"complaints of: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
