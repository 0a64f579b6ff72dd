"""What import-linter and ruff do not check of the house, read from syntax trees of `ragfuse/` and
the integrations.

Which package may import which stands in pyproject.toml.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_PACKAGES = {"adapters", "remote", "transfer"}
"""For clients, and for engines that decode: what their `__all__` names."""
PUBLIC_FILES = {"types.arguments", "types.texts"}
"""For classes of frameworks."""
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "ContextVar",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "local",
    "Lock",
    "RLock",
    "Event",
    "Condition",
    "Queue",
}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAX_LINES = 700
BUDGETS = {
    "adapt": 4_500,
    "adapters": 2_500,
    "calibration": 5_000,
    "cli": 18_500,
    "codec": 6_300,
    "demo": 2_400,
    "engine": 26_300,
    "fuse": 9_200,
    "hf": 28_100,
    "load": 6_900,
    "models": 6_400,
    "plan": 7_300,
    "process": 2_600,
    "ray": 4_000,
    "remote": 3_900,
    "schemas": 12_700,
    "serve": 23_200,
    "sessions": 3_400,
    "store": 22_200,
    "telemetry": 2_800,
    "text": 14_300,
    "transfer": 1_900,
    "types": 5_800,
}
"""Most tokens of code in a package, docstrings and comments left out. A budget only falls."""
UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def texts(folder: str) -> dict[str, str]:
    """The sources of a folder by their paths in it, tests left out."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {
        path.relative_to(ROOT / folder).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if "tests" not in path.parts[len(ROOT.parts) :]
    }
    assert len(found) > 10
    return found


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in texts(folder).items()}


def values_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """The names that statements of a module assign, and their values."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, ast.If | ast.Try | ast.With):
            below = ast.iter_child_nodes(node)
            yield from values_of([child for child in below if isinstance(child, ast.stmt)])


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return any(is_mutable(element) for element in value.elts)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def mutable_names(tree: ast.Module) -> list[str]:
    return [name for name, value in values_of(tree.body) if name != "__all__" and is_mutable(value)]


@pytest.mark.parametrize(
    "text", ["A = {}", "A: dict[str, int] = dict()", "if True:\n    A = (1, [2])", "A = Lock()"]
)
def test_mutable_state_is_noticed(text: str) -> None:
    assert mutable_names(ast.parse(text)) == ["A"]


def test_only_process_holds_state_of_a_module() -> None:
    found = {path: mutable_names(tree) for path, tree in trees("ragfuse").items()}
    assert {path for path, names in found.items() if names and path.split("/")[0] != "process"} == (
        set()
    )


@pytest.mark.parametrize("folder", ["ragfuse", "integrations"])
def test_files_are_short(folder: str) -> None:
    lines = {path: text.count("\n") for path, text in texts(folder).items()}
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}


def n_tokens(path: str) -> int:
    """Return how many tokens of code a file of ragfuse has."""
    kept = tokenize.generate_tokens(io.StringIO(texts("ragfuse")[path]).readline)
    told = [node.value for node in ast.walk(trees("ragfuse")[path]) if isinstance(node, ast.Expr)]
    docstrings = [
        each for each in told if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return sum(token.type not in UNCOUNTED for token in kept) - len(docstrings)


def test_no_package_exceeds_its_budget() -> None:
    found: dict[str, int] = {}
    for path in texts("ragfuse"):
        package, _, file = path.partition("/")
        if file:
            found[package] = found.get(package, 0) + n_tokens(path)
    assert set(found) == set(BUDGETS)
    assert {name: n for name, n in found.items() if n > BUDGETS[name]} == {}


def test_no_name_of_a_class_or_constant_stands_twice() -> None:
    homes: dict[str, set[str]] = {}
    for path, tree in trees("ragfuse").items():
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names = [each for name, _ in values_of(tree.body) for each in name.strip("()").split(", ")]
        constants = [name for name in names if name.isupper() and name[0] != "_" and len(name) > 1]
        for name in classes + constants:
            homes.setdefault(name, set()).add(path)
    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == {}


def test_the_engine_has_at_most_twenty_public_methods() -> None:
    tree = trees("ragfuse")["engine/engine.py"]
    engine = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine"
    )
    methods = [each.name for each in engine.body if isinstance(each, ast.FunctionDef)]
    assert len([name for name in methods if name[0] != "_"]) <= 20


def test_ruff_bans_what_unpickles() -> None:
    code = "import pickle\nimport torch\ntorch.load('x')\n"
    options = [
        "-m",
        "ruff",
        "check",
        "--select",
        "TID251",
        "--stdin-filename",
        "ragfuse/store/x.py",
        "-",
    ]
    done = subprocess.run(
        [sys.executable, *options],
        input=code,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "`pickle` is banned" in done.stdout
    assert "`torch.load` is banned" in done.stdout


def public_names() -> list[str]:
    front = dict(values_of(trees("ragfuse")["__init__.py"].body))
    return [str(name) for name in ast.literal_eval(front["__all__"])]


def hidden_names(tree: ast.Module) -> Iterator[str]:
    """What a module takes of ragfuse beside its public names."""
    public = public_names()
    for node in ast.walk(tree):
        paths: list[str] = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ragfuse":
            paths = [f"ragfuse.{node.attr}"]
        for path in paths:
            root, _, name = path.partition(".")
            is_public = name in public or name.split(".")[0] in PUBLIC_PACKAGES
            is_public |= name.rpartition(".")[0] in PUBLIC_FILES
            if root == "ragfuse" and name and not is_public:
                yield path


@pytest.mark.parametrize(
    "text",
    [
        "from ragfuse.store import KVStore",
        "from ragfuse import _hidden",
        "import ragfuse\nragfuse.hf.load()",
    ],
)
def test_an_integration_behind_the_front_door_is_noticed(text: str) -> None:
    assert list(hidden_names(ast.parse(text)))


def test_integrations_stand_on_public_names_only() -> None:
    found = {path: list(hidden_names(tree)) for path, tree in trees("integrations").items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "package",
    [
        "llama-index-llms-ragfuse/llama_index/llms/ragfuse",
        "haystack-ragfuse/haystack_integrations/components/generators/ragfuse",
    ],
)
def test_the_namespace_of_a_framework_stays_open(package: str) -> None:
    own = ROOT / "integrations" / package
    assert (own / "__init__.py").exists()
    above = list(own.parents)[: len(package.split("/")) - 2]
    assert [path for path in above if (path / "__init__.py").exists()] == []


def test_the_front_door_is_small_and_sorted() -> None:
    names = public_names()
    assert 0 < len(names) <= 21
    assert names == sorted(names)


def test_no_file_names_a_path_of_one_machine() -> None:
    names = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(names, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = {re.escape(str(place)) for place in (ROOT, Path.home()) if len(place.parts) > 1}
    any_of = "|".join([*places, "/(?:work|home|Users|root)/[a-z]+", "/tmp/[a-z]+/"])
    pattern = re.compile(rf"(?<![\w.])(?:{any_of})".encode())
    assert pattern.search(b"cd " + b"/home" + b"/someone/x")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]
    contents = {path: path.read_bytes() for path in files}
    found = {
        path.name: pattern.findall(content)
        for path, content in contents.items()
        if b"\0" not in content[:8192]
    }
    assert {name: places for name, places in found.items() if places} == {}


def test_every_test_that_holds_a_promise_is_there() -> None:
    from tests.promises.__main__ import PROMISES

    files = {test.partition("::")[0] for tests in PROMISES.values() for test in tests}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
