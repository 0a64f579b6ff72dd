"""What import-linter and ruff do not check of the house, read from syntax trees of `ragfuse/` and
the integrations.

Each rule is a function from one source to its violations. Every rule is shown to catch a bad
snippet first, so that its silence over the real files means something. Which package may import
which stands in pyproject.toml.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VALUES = {"errors", "process", "settings", "types"}
BELOW_ENGINE = {
    "codec",
    "fuse",
    "hf",
    "load",
    "models",
    "plan",
    "schemas",
    "sessions",
    "store",
    "telemetry",
}
BELOW_ENGINE |= {"text", "transfer"}

# for clients, and for engines that decode: what its __all__ names
PUBLIC_PACKAGES = {"adapters", "remote", "transfer"}
PUBLIC_FILES = {"types.arguments", "types.whole_text"}  # for classes of frameworks
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
}
MUTABLE_CALLS |= {
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
    "adapt": 5_500,
    "adapters": 2_600,
    "admin": 3_600,
    "calibration": 7_300,
    "cli": 19_600,
    "codec": 8_800,
    "demo": 3_400,
    "engine": 35_300,
    "fuse": 10_000,
    "hf": 32_400,
    "load": 8_200,
    "models": 7_200,
    "plan": 8_900,
    "process": 2_600,
    "ray": 5_200,
    "remote": 4_800,
    "schemas": 14_800,
    "serve": 29_400,
    "sessions": 4_300,
    "store": 26_600,
    "telemetry": 3_400,
    "text": 16_100,
    "transfer": 2_300,
    "types": 6_900,
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


@dataclass(frozen=True)
class Import:
    """One imported thing: its dotted path and the line."""

    path: str
    line: int

    @property
    def root(self) -> str:
        return self.path.split(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its path below `ragfuse/` (or below the repository, for an integration) and its
    text.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


Rule = Callable[[Source], Iterator[str]]


def modules_hold_no_mutable_state(source: Source) -> Iterator[str]:
    """Only `process` holds state of a whole process: models that are loaded once, and what its end
    waits for.
    """
    if source.room == "process":
        return
    for name, value in _module_values(source.tree.body):
        if name != "__all__" and _is_mutable(value):
            yield (
                f"line {value.lineno}: '{name}' can be changed (a tuple, frozenset or"
                " MappingProxyType cannot)"
            )
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


def _module_values(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _module_values(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return any(_is_mutable(element) for element in value.elts)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def no_open_keywords_below_the_engine(source: Source) -> Iterator[str]:
    """What `wraps` a function passes on what that takes; in `hf` a callback may take what
    transformers hands it.
    """
    if source.room not in {*VALUES, *BELOW_ENGINE} - {"telemetry"}:
        return
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and node.args.kwarg
        ):
            name = node.args.kwarg.arg
            if not _wraps(node) and (source.room != "hf" or _passes_on(node, name)):
                yield f"line {node.lineno}: **{name}"


def _passes_on(function: ast.AST, name: str) -> bool:
    keywords = (
        node for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg is None
    )
    return any(isinstance(node.value, ast.Name) and node.value.id == name for node in keywords)


def _wraps(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    marks = () if isinstance(function, ast.Lambda) else function.decorator_list
    return any(
        isinstance(mark, ast.Call) and ast.unparse(mark.func).split(".")[-1] == "wraps"
        for mark in marks
    )


def files_are_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MAX_LINES:
        yield f"{lines} lines, at most {MAX_LINES}"


def what_is_public_says_what_it_gives(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield "the module has no docstring"
    yield from _undocumented(source.tree.body)


def _undocumented(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if not ast.get_docstring(node) and not marks & {"override", "overload", "setter"}:
            yield f"line {node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node.body)


def integrations_use_public_names(source: Source) -> Iterator[str]:
    public = _public_names()
    for item in source.imports:
        name = item.path.removeprefix("ragfuse").lstrip(".")
        is_public = (
            name in public
            or name.split(".")[0] in PUBLIC_PACKAGES
            or name.rpartition(".")[0] in PUBLIC_FILES
        )
        if item.root == "ragfuse" and name and not is_public:
            yield f"line {item.line}: '{item.path}' is not a public name of ragfuse"
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "ragfuse"
            and node.attr not in public
        ):
            yield f"line {node.lineno}: 'ragfuse.{node.attr}' is not a public name"


def _public_names() -> list[str]:
    door = ROOT / "ragfuse" / "__init__.py"
    for name, value in _module_values(ast.parse(door.read_text()).body if door.exists() else []):
        if name == "__all__":
            return [str(item) for item in ast.literal_eval(value)]
    return []


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        modules_hold_no_mutable_state,
        no_open_keywords_below_the_engine,
        files_are_short,
        what_is_public_says_what_it_gives,
    )
}

BAD = [
    ("modules_hold_no_mutable_state", "types/a.py", "CACHE = {}"),
    ("modules_hold_no_mutable_state", "types/a.py", "CACHE: dict[str, int] = dict()"),
    ("modules_hold_no_mutable_state", "types/a.py", "if True:\n    PAIR = (1, [2])"),
    ("modules_hold_no_mutable_state", "types/a.py", "import threading\n_lock = threading.Lock()"),
    ("modules_hold_no_mutable_state", "types/a.py", "N = 0\ndef f():\n    global N\n    N = 1"),
    ("no_open_keywords_below_the_engine", "store/a.py", "def f(**options): ..."),
    (
        "no_open_keywords_below_the_engine",
        "hf/a.py",
        "def f(model, **options):\n    model(**options)",
    ),
    ("files_are_short", "types/a.py", "x = 1\n" * (MAX_LINES + 1)),
    ("what_is_public_says_what_it_gives", "types/a.py", '"""Doc."""\ndef f(): ...'),
    (
        "what_is_public_says_what_it_gives",
        "types/a.py",
        '"""Doc."""\nclass A:\n    """A."""\n    def f(self): ...',
    ),
    ("what_is_public_says_what_it_gives", "types/a.py", "def _f(): ..."),
]

GOOD = [
    (
        "modules_hold_no_mutable_state",
        "types/a.py",
        "__all__ = ['A']\nA = MappingProxyType({'a': 1})\nB = (1, 2)",
    ),
    (
        "no_open_keywords_below_the_engine",
        "hf/a.py",
        "def attention(q, **options):\n    return options.get('x')",
    ),
    (
        "no_open_keywords_below_the_engine",
        "hf/a.py",
        "@wraps(g)\ndef f(**options):\n    return g(**options)",
    ),
    (
        "what_is_public_says_what_it_gives",
        "types/a.py",
        '"""Doc."""\ndef f():\n    """F."""\n    def g(): ...',
    ),
]


@cache
def _sources(folder: str, below: Path) -> list[Source]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [
        Source(path.relative_to(below).as_posix(), path.read_text(encoding="utf-8"))
        for path in files
    ]


def _text_files() -> Iterator[Path]:
    """Files that git tracks or would track, as far as they are text."""
    names = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(names, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in path.read_bytes()[:8192]:
            yield path


@pytest.mark.parametrize("rule", RULES)
def test_ragfuse_keeps_the_rule(rule: str) -> None:
    sources = _sources("ragfuse", below=ROOT / "ragfuse")
    assert len(sources) > 10
    assert [f"{source.path}: {found}" for source in sources for found in RULES[rule](source)] == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_broken_rule_is_noticed(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule](Source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_what_the_rules_allow_is_let_through(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule](Source(path, text))) == []


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_the_top_holds_four_files() -> None:
    found = sorted(path.name for path in (ROOT / "ragfuse").glob("*.py"))
    assert found == ["__init__.py", "__main__.py", "errors.py", "settings.py"]


def test_every_package_says_what_it_holds_in_a_few_lines() -> None:
    packages = [
        source
        for source in _sources("ragfuse", below=ROOT / "ragfuse")
        if source.path.endswith("__init__.py")
    ]
    lines = {each.path: len((ast.get_docstring(each.tree) or "").splitlines()) for each in packages}
    assert {path: n for path, n in lines.items() if not 1 <= n <= 5} == {}


def _modules() -> dict[str, Source]:
    """All modules of ragfuse by their dotted names."""
    sources = _sources("ragfuse", below=ROOT / "ragfuse")
    return {
        f"ragfuse.{source.path.removesuffix('.py').replace('/', '.')}".removesuffix(
            ".__init__"
        ): source
        for source in sources
    }


def _n_tokens(source: Source) -> int:
    texts = (
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    n_docstrings = sum(isinstance(node.value.value, str) for node in texts)
    return (
        sum(
            t.type not in UNCOUNTED
            for t in tokenize.generate_tokens(io.StringIO(source.text).readline)
        )
        - n_docstrings
    )


def test_no_package_exceeds_its_budget() -> None:
    found: dict[str, int] = {}
    for source in _sources("ragfuse", below=ROOT / "ragfuse"):
        if "/" in source.path:
            found[source.room] = found.get(source.room, 0) + _n_tokens(source)
    assert set(found) == set(BUDGETS)
    assert {name: n for name, n in found.items() if n > BUDGETS[name]} == {}


def test_no_class_name_stands_twice() -> None:
    homes: dict[str, set[str]] = {}
    for name, source in _modules().items():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(name)
    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == {}


def test_no_constant_has_several_homes() -> None:
    homes: dict[str, set[str]] = {}
    for name, source in _modules().items():
        for target, _ in _module_values(source.tree.body):
            for each in target.strip("()").split(", "):
                if each.isupper() and len(each) > 1 and not each.startswith("_"):
                    homes.setdefault(each, set()).add(name)
    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == {}


def test_no_module_is_named_by_a_gerund() -> None:
    assert [name for name in _modules() if name.endswith("ing")] == []


def test_the_engine_has_at_most_twenty_public_methods() -> None:
    tree = _modules()["ragfuse.engine.engine"].tree
    engine = next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Engine"
    )
    public = [
        each.name
        for each in engine.body
        if isinstance(each, ast.FunctionDef) and each.name[0] != "_"
    ]
    assert len(public) <= 20, public


def test_ruff_bans_what_unpickles() -> None:
    code = "import pickle\nimport torch\ntorch.load('x')\n"
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "TID251",
        "--stdin-filename",
        "ragfuse/store/x.py",
        "-",
    ]
    done = subprocess.run(ruff, input=code, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("`pickle` is banned" in done.stdout, "`torch.load` is banned" in done.stdout) == (
        True,
        True,
    )


def test_integrations_stand_on_public_names_only() -> None:
    sources = [
        source for source in _sources("integrations", below=ROOT) if "/tests/" not in source.path
    ]
    assert len(sources) >= 2
    assert [
        f"{source.path}: {found}"
        for source in sources
        for found in integrations_use_public_names(source)
    ] == []


def test_files_of_integrations_are_short() -> None:
    sources = [
        source for source in _sources("integrations", below=ROOT) if "/tests/" not in source.path
    ]
    assert [
        f"{source.path}: {found}" for source in sources for found in files_are_short(source)
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "from ragfuse.store import KVStore",
        "from ragfuse import _hidden",
        "import ragfuse\nragfuse.hf.load()",
    ],
)
def test_an_integration_behind_the_front_door_is_noticed(text: str) -> None:
    assert list(integrations_use_public_names(Source("integrations/x/x.py", text)))


@pytest.mark.parametrize(
    "package",
    [
        "llama-index-llms-ragfuse/llama_index/llms/ragfuse",
        "haystack-ragfuse/haystack_integrations/components/generators/ragfuse",
    ],
)
def test_the_namespace_of_a_framework_stays_open(package: str) -> None:
    sibling, *folders = package.split("/")
    own = ROOT / "integrations" / package
    assert (own / "__init__.py").exists()
    above = list(own.parents)[: len(folders) - 1]
    assert [path for path in above if (path / "__init__.py").exists()] == []
    assert above[-1].parent.name == sibling


def test_the_front_door_is_small_and_sorted() -> None:
    names = _public_names()
    assert 0 < len(names) <= 21
    assert names == sorted(names)


def test_no_file_names_a_path_of_one_machine() -> None:
    places = {re.escape(str(place)) for place in (ROOT, Path.home()) if len(place.parts) > 1}
    pattern = re.compile(
        r"(?<![\w.])(?:"
        + "|".join([*places, "/(?:work|home|Users|root)/[a-z]+", "/tmp/[a-z]+/"])
        + ")"
    )
    assert pattern.search("cd " + "/home" + "/someone/x")
    found = {
        path: pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        for path in _text_files()
    }
    assert {
        str(path.relative_to(ROOT)): match.group() for path, match in found.items() if match
    } == {}


def test_every_test_that_holds_a_promise_is_there() -> None:
    from tests.promises import PROMISES

    files = {test.partition("::")[0] for tests in PROMISES.values() for test in tests}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
