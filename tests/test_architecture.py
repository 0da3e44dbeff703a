"""The house rules that a reader relies on: which room may know which, and what is public."""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import nofuss

ROOT = Path(nofuss.__file__).parent
BASE = {"errors", "geometry", "config", "progress", "distributed", "files", "cache"}
# Every room → what of ours it may import, besides itself. A room that is not named here fails.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "geometry": set(),
    "config": {"errors"},
    "progress": set(),
    "distributed": {"errors", "geometry"},
    "files": {"errors", "distributed"},
    "cache": {"errors", "files"},
    "proxies": {"distributed", "geometry"},
    "losses": {"geometry", "distributed", "proxies"},
    "evaluate": {"distributed", "geometry", "progress"},  # its threads
    "ranking": {"geometry", "progress", "evaluate"},
    "data": BASE,
    "model": BASE | {"data"},  # the encoder and the cached features read collections
    "run": BASE | {"evaluate", "model"},  # a choice: gains, and a recipe of the closed form
    "report": BASE | {"data", "model", "evaluate", "ranking", "run", "losses", "proxies"},
    "search": BASE | {"data", "model", "evaluate", "ranking", "run"},
    "training": BASE
    | {"data", "model", "proxies", "losses", "evaluate", "ranking", "run", "report", "search"},
}
MAY_IMPORT["estimator"] = MAY_IMPORT["training"] | {"training"}
MAY_IMPORT["paper"] = MAY_IMPORT["estimator"]
MAY_IMPORT["commands"] = MAY_IMPORT["paper"] | {"paper"}
MAY_IMPORT["cli"] = {"errors", "distributed", "commands"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = MAY_IMPORT["commands"] | {"estimator"}
HALL = {
    *("__init__", "__main__", "cache", "cli", "config", "errors", "estimator"),
    *("files", "geometry", "progress"),
}
FILES = sorted(ROOT.rglob("*.py"))
TESTED_BY = {  # sources whose tests have another name, and where they are
    "commands/demo.py": "tests/test_cli.py: train on the built-in set",
    "commands/embed.py": "tests/test_cli.py, tests/distributed/test_processes.py",
    "commands/scoring.py": "tests/commands/test_evaluate.py, test_compare.py: its two users",
    "data/open.py": "tests/data/readers/: every layout is opened through it",
    "errors.py": "whatever is refused anywhere",
    "evaluate/retrieval.py": "tests/evaluate/test_recall.py, test_ranks.py, test_precision.py",
    "model/lora.py": "tests/model/test_timm.py: only its networks have attention",
    "model/manifest.py": "tests/model/test_saved.py, tests/search/test_folder.py",
    "paper/published.py": "tests/paper/test_page.py",
    "report/sections.py": "tests/report/test_report.py: a page of them",
    "run/choice.py": "tests/training/test_head.py, which makes choices",
    "search/engines/milvus.py": "tests/search/engines/test_engines.py: every engine alike",
    "search/engines/postgres.py": "tests/search/engines/test_engines.py",
    "search/index.py": "tests/search/test_folder.py, engines/test_engines.py: by every index",
    "search/page/guard.py": "tests/search/page/test_server.py, test_proxy.py",
    "search/page/map.py": "tests/search/page/test_state.py",
    "search/page/routes.py": "tests/search/page/test_server.py, test_labels.py",
    "training/network.py": "tests/training/test_settings.py, tests/model/test_onnx.py",
    "training/score.py": "tests/training/test_train.py, tests/commands/test_evaluate.py",
}
SHORT = 60
"""Lines: shorter files are tested with what uses them."""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms of ours that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("nofuss.")}
    return found - {"__version__"}


def test_imports_point_one_way() -> None:
    for path in FILES:
        room = room_of(path)
        assert room in MAY_IMPORT, f"{room} is a new room: say what it may import"
        assert imported(path) - {room} <= MAY_IMPORT[room], path


def test_no_two_rooms_import_each_other() -> None:
    """What the table allows has no circle, so neither has what is there."""
    settled: set[str] = set()
    while left := MAY_IMPORT.keys() - settled:
        free = {room for room in left if MAY_IMPORT[room] <= settled}
        assert free, f"these wait for each other: {sorted(left)}"
        settled |= free


def test_the_table_names_only_rooms_that_exist() -> None:
    assert {room_of(path) for path in FILES} == MAY_IMPORT.keys()


def test_the_hall_is_empty() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == HALL


def test_the_walk_sees_imports() -> None:
    """A test of the test: rooms that do import others are seen to."""
    assert {"losses", "model", "data"} <= imported(ROOT / "training" / "train.py")


def test_every_file_says_what_it_is() -> None:
    assert [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_a_test_file_for_a_source_file() -> None:
    tests, found = Path(__file__).parent, set[str]()
    for path in FILES:
        name = path.relative_to(ROOT)
        is_long = len(path.read_text().splitlines()) > SHORT and path.stem[0] != "_"
        if is_long and not (tests / name.parent / f"test_{name.name}").is_file():
            found.add(name.as_posix())
    assert found == TESTED_BY.keys(), "add its test file, or say above what tests it"


def prints(path: Path) -> list[str]:
    """What a file does that reaches a terminal: calls of print, writes to it, imports of rich."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "rich"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rich":
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Name) and node.func.id == "print")
            or ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write")
        ):
            found.append(ast.unparse(node))
    return found


def test_only_commands_print() -> None:
    """A library logs; it is `imported` that keeps commands/console.py from the rooms below."""
    for path in FILES:
        assert room_of(path) in ("commands", "cli") or prints(path) == [], path


def test_the_search_for_prints_sees_them() -> None:
    """A test of the test."""
    found = prints(ROOT / "commands" / "console.py")
    assert {"rich.console", "rich.progress"} <= set(found)
    assert any(call.startswith("print(json.dumps(content") for call in found)


def test_no_pickle_no_eval() -> None:
    """torch.load is called in one place, with weights_only."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "dill", "joblib", "cloudpickle"} & set(names), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec"), path
                if called == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), path
                if called in ("np.load", "numpy.load"):
                    assert "allow_pickle=False" in ast.unparse(node), path


def test_no_global_seeding() -> None:
    """torch.manual_seed only inside fork_rng; never numpy's or Python's global generators."""
    for path in FILES:
        text = path.read_text()
        assert "np.random.seed" not in text, path
        assert "random.seed(" not in text.replace("np.random.seed(", ""), path
        if re.search(r"\btorch\.manual_seed\(", text):
            assert "fork_rng" in text, path


def test_public_names_are_sorted_and_resolve() -> None:
    names = nofuss.__all__
    assert names == sorted(set(names))
    assert set(names) <= set(dir(nofuss))
    kept_as = {"Index": "FolderIndex"}  # `Index` is what every kind of index can do
    for name in names:
        assert getattr(nofuss, name).__name__ == kept_as.get(name, name)
    with pytest.raises(AttributeError, match="no attribute 'ProxyNCa'"):
        nofuss.ProxyNCa  # noqa: B018


@pytest.mark.parametrize("name", nofuss.__all__)
def test_public_names_open_with_one_line(name: str) -> None:
    text = inspect.getdoc(getattr(nofuss, name))
    assert text
    first, *rest = text.splitlines()
    assert first[-1] in ".:"
    assert not rest or rest[0] == ""


def test_public_modules_define_what_they_export() -> None:
    for room in ("evaluate", "losses", "proxies"):
        module = __import__(f"nofuss.{room}", fromlist=["x"])
        for name in module.__all__:
            assert hasattr(module, name), f"{room}.{name}"


def tracked() -> list[Path]:
    """Files under version control; all of ours where git is not there to ask."""
    top = ROOT.parent
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=top, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return FILES
    return [top / name for name in listed.split("\0") if name and (top / name).is_file()]


def test_no_paths_of_one_machine() -> None:
    """Nothing in the repository knows where somebody's home or scratch directory is."""
    places = re.compile(r"(?<![\w.~}*-])/(?:work|home|root|tmp|Users)/\w")
    found = [
        f"{path}: {match.group()}"
        for path in tracked()
        if path != Path(__file__) and b"\0" not in (content := path.read_bytes())
        for match in places.finditer(content.decode())
    ]
    assert found == []
