"""The import rules of the house, read from the syntax trees of `ragfuse/` and the integrations.

Each rule is a function from one source to its violations. Every rule is shown to catch a bad snippet first, so that
its silence over the real files means something. A new room gets a line in ROOMS (and one in docs/house.md).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VALUES = {"errors", "process", "settings", "types"}
"""What any package may import, but for `plan` and `fuse`, which need no process and no settings."""
BELOW_ENGINE = {"codec", "fuse", "hf", "load", "models", "plan", "schemas", "sessions", "store", "telemetry"}
BELOW_ENGINE |= {"text", "transfer"}
BELOW_DOORS = {*VALUES, *BELOW_ENGINE, "admin", "engine"}

# Package -> what it may import of ragfuse besides itself; "plan.cost" is one file of a package.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "process": set(),
    "settings": {
        "process.folders",
        "errors",
        "types.arguments",
        "types.eviction",
        "types.levels",
        "types.load_options",
        "types.places",
        "types.selection",
        "types.tiers",
    },
    "types": {"errors"},
    "fuse": {"errors", "types"},
    "codec": {"errors", "fuse.rope", "types"},
    "plan": {"errors", "settings", "types"},
    "text": VALUES,
    "store": {*VALUES, "codec"},
    "schemas": {*VALUES, "store", "text"},
    "hf": {*VALUES, "fuse"},
    "models": {*VALUES, "hf"},
    "load": {*VALUES, "codec", "fuse", "hf", "plan", "store"},
    "sessions": {*VALUES, "plan", "store", "text"},
    "telemetry": {*VALUES, "store"},
    "transfer": {*VALUES, "codec", "store"},
    "engine": {*VALUES, *BELOW_ENGINE},
    "remote": {
        *VALUES,
        "engine.answer_stream",
        "engine.ask",
        "engine.engine",
        "engine.question",
        "schemas.nodes",
        "schemas.pml",
        "schemas.pml_writer",
        "text.chat_messages",
    },
    "adapters": {
        *VALUES,
        "engine.answer_stream",
        "engine.ask",
        "engine.engine",
        "engine.question",
        "remote",
        "schemas.pml_template",
        "telemetry.progress",
        "text.retrieval_runs",
    },
    "admin": {*VALUES, "engine", "plan", "schemas", "sessions", "store"},
    "calibration": BELOW_DOORS,
    "adapt": {*BELOW_DOORS, "calibration"},
    "demo": {*BELOW_DOORS, "calibration"},
    "serve": {
        *VALUES,
        "admin",
        "engine",
        "models.embedder",
        "plan.explanation",
        "schemas.pml",
        "sessions",
        "store.deletion",
        "store.record_file",
        "store.tenants",
        "telemetry",
        "text",
        "transfer",
    },
    "ray": {*VALUES, "admin", "engine", "serve", "store.urls"},
    "cli": {
        *VALUES,
        "adapt",
        "admin",
        "calibration",
        "demo",
        "engine",
        "models",
        "ray",
        "remote",
        "serve",
        "store",
        "telemetry.progress",
        "text.chat_messages",
        "text.file_texts",
        "text.splits",
        "schemas.pml",
    },
    "__main__": {"cli"},
    "__init__": {*VALUES, "admin", "engine", "schemas.pml_template", "telemetry", "text"},
}
# Room -> all that it may import besides the standard library and ragfuse.
ONLY = {
    "types": {"blake3", "pydantic", "torch"},
    "errors": set[str](),
    "process": {"cachetools"},
    "settings": {"pydantic", "pydantic_settings", "platformdirs"},
    "fuse": {"torch"},
}
# `plan` decides: it reads no tensor, no clock and no file.
NOT_FOR_PLAN = {"torch", "numpy", "time", "datetime", "io", "os", "pathlib", "shutil", "tempfile", "sqlite3", "socket"}
NOT_FOR_PLAN |= {"subprocess", "threading", "asyncio", "fsspec", "safetensors", "httpx", "requests", "urllib"}
HUGGING_FACE = {"transformers", "tokenizers", "huggingface_hub", "accelerate", "gguf", "peft"}
FRAMEWORKS = {"llama_index", "faiss", "sentence_transformers", "langgraph"}  # and every langchain*
BEHIND_EXTRAS = {*FRAMEWORKS, "accelerate", "gguf", "peft", "scipy", "rouge_score", "matplotlib", "pypdf", "bs4"}
BEHIND_EXTRAS |= {"redis", "hiredis", "s3fs", "llguidance", "opentelemetry", "prometheus_client"}
# Room -> packages of an extra that it may import at module level, as it is imported itself only when it is asked for.
OF_EXTRAS = {"serve": {"fastapi", "httpx", "starlette", "uvicorn"}, "remote": {"httpx", "tenacity"}}
LOADED_BY_RAY = {"ray/request_router.py", "ray/deployment.py"}  # which nothing imports but Ray, and functions
BEHIND_EXTRAS |= {"ray"} | {name for names in OF_EXTRAS.values() for name in names}
PUBLIC_PACKAGES = {"adapters", "remote", "transfer"}  # for clients, and for engines that decode: what its __all__ names
PUBLIC_FILES = {"types.arguments", "types.whole_text"}  # for classes of frameworks
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ContextVar"}
MUTABLE_CALLS |= {"WeakKeyDictionary", "WeakValueDictionary", "local", "Lock", "RLock", "Event", "Condition", "Queue"}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAX_LINES = 600


@dataclass(frozen=True)
class Import:
    """One imported thing: its dotted path, the line, whether it waits inside a function."""

    path: str
    line: int
    lazy: bool

    @property
    def root(self) -> str:
        return self.path.split(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its path below `ragfuse/` (or below the repository, for an integration) and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, lazy=False))

    def _imports(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                yield from (Import(f"{base}.{alias.name}".strip("."), child.lineno, lazy) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from self._imports(child, lazy or inside)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folders = ["ragfuse", *self.path.split("/")[:-1]]
        return ".".join([*folders[: len(folders) - node.level + 1], *filter(None, [node.module])])


Rule = Callable[[Source], Iterator[str]]


def rooms_import_only_what_stands_below(source: Source) -> Iterator[str]:
    if source.room not in ROOMS:
        yield f"room '{source.room}' is not in the picture"
        return
    for item in source.imports:
        if item.root != "ragfuse":
            continue
        target = item.path.removeprefix("ragfuse").lstrip(".")
        if target.split(".")[0] not in ROOMS:
            target = f"__init__.{target}"  # `import ragfuse`, or a public name: through the front door
        if not any(f"{target}.".startswith(f"{room}.") for room in {source.room, *ROOMS[source.room]}):
            yield f"line {item.line}: '{source.room}' imports '{target}'"


def some_rooms_know_only_few_packages(source: Source) -> Iterator[str]:
    for item in source.imports:
        known = item.root in sys.stdlib_module_names or item.root == "ragfuse"
        if source.room in ONLY and not known and item.root not in ONLY[source.room]:
            yield f"line {item.line}: '{source.room}' imports '{item.path}'"


def plan_reads_no_tensor_clock_or_file(source: Source) -> Iterator[str]:
    if source.room != "plan":
        return
    yield from (f"line {item.line}: imports '{item.path}'" for item in source.imports if item.root in NOT_FOR_PLAN)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"open", "input"}:
            yield f"line {node.lineno}: calls {node.func.id}()"


def hugging_face_has_one_home(source: Source) -> Iterator[str]:
    for item in source.imports:
        if item.root in HUGGING_FACE and source.room not in ("hf", "models"):
            yield f"line {item.line}: '{source.room}' imports '{item.path}'"


def frameworks_are_for_few_doors(source: Source) -> Iterator[str]:
    for item in source.imports:
        framework = item.root in FRAMEWORKS or item.root.startswith("langchain")
        embeds = item.root == "sentence_transformers" and source.path == "models/embedder.py"
        splits = item.root == "langchain_text_splitters" and source.path == "text/splits.py"
        if framework and not embeds and not splits and source.room not in {"calibration", "cli", "demo"}:
            yield f"line {item.line}: '{source.room}' imports '{item.path}'"


def extras_are_imported_lazily(source: Source) -> Iterator[str]:
    for item in source.imports:
        extra = item.root in BEHIND_EXTRAS or item.root.startswith("langchain")
        own = OF_EXTRAS["serve"] | {"ray"} if source.path in LOADED_BY_RAY else OF_EXTRAS.get(source.room, set())
        if extra and not item.lazy and item.root not in own:
            yield f"line {item.line}: imports '{item.path}' at module level"


def nothing_unpickles(source: Source) -> Iterator[str]:
    for item in source.imports:
        if item.root in UNSAFE or item.path in {"torch.load", "torch.save"}:
            yield f"line {item.line}: imports '{item.path}'"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"line {node.lineno}: allow_pickle"


def modules_hold_no_mutable_state(source: Source) -> Iterator[str]:
    """Only `process` holds state of a whole process: models that are loaded once, and what its end waits for."""
    if source.room == "process":
        return
    for name, value in _module_values(source.tree.body):
        if name != "__all__" and _is_mutable(value):
            yield f"line {value.lineno}: '{name}' can be changed (a tuple, frozenset or MappingProxyType cannot)"
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
            yield from _module_values([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return any(_is_mutable(element) for element in value.elts)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def no_open_keywords_below_the_engine(source: Source) -> Iterator[str]:
    """What `wraps` a function passes on what that takes; in `hf` a callback may take what transformers hands it."""
    if source.room not in {*VALUES, *BELOW_ENGINE} - {"telemetry"}:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg:
            name = node.args.kwarg.arg
            if not _wraps(node) and (source.room != "hf" or _passes_on(node, name)):
                yield f"line {node.lineno}: **{name}"


def _passes_on(function: ast.AST, name: str) -> bool:
    keywords = (node for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg is None)
    return any(isinstance(node.value, ast.Name) and node.value.id == name for node in keywords)


def _wraps(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    marks = () if isinstance(function, ast.Lambda) else function.decorator_list
    return any(isinstance(mark, ast.Call) and ast.unparse(mark.func).split(".")[-1] == "wraps" for mark in marks)


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
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
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
        is_public = name in public or name.split(".")[0] in PUBLIC_PACKAGES or name.rpartition(".")[0] in PUBLIC_FILES
        if item.root == "ragfuse" and name and not is_public:
            yield f"line {item.line}: '{item.path}' is not a public name of ragfuse"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ragfuse" and node.attr not in public:
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
        rooms_import_only_what_stands_below,
        some_rooms_know_only_few_packages,
        plan_reads_no_tensor_clock_or_file,
        hugging_face_has_one_home,
        frameworks_are_for_few_doors,
        extras_are_imported_lazily,
        nothing_unpickles,
        modules_hold_no_mutable_state,
        no_open_keywords_below_the_engine,
        files_are_short,
        what_is_public_says_what_it_gives,
    )
}

BAD = [
    ("rooms_import_only_what_stands_below", "fuse/a.py", "from ragfuse.store import KVStore"),
    ("rooms_import_only_what_stands_below", "fuse/a.py", "def f():\n    from ragfuse import store"),
    ("rooms_import_only_what_stands_below", "fuse/select/a.py", "from ...store.disk import DiskTier"),
    ("rooms_import_only_what_stands_below", "text/a.py", "import ragfuse.codec"),
    ("rooms_import_only_what_stands_below", "text/a.py", "from ragfuse import Engine"),
    ("rooms_import_only_what_stands_below", "store/a.py", "from ragfuse.plan.evict import lru"),
    ("rooms_import_only_what_stands_below", "hf/a.py", "from ragfuse.store import KVStore"),
    ("rooms_import_only_what_stands_below", "load/a.py", "from ragfuse.engine import controller"),
    ("rooms_import_only_what_stands_below", "engine/a.py", "from ragfuse.cli import app"),
    ("rooms_import_only_what_stands_below", "cli/a.py", "from ragfuse.hf import model"),
    ("rooms_import_only_what_stands_below", "types/a.py", "from ragfuse.settings import Settings"),
    ("rooms_import_only_what_stands_below", "helpers.py", "import math"),
    ("some_rooms_know_only_few_packages", "fuse/a.py", "import numpy"),
    ("some_rooms_know_only_few_packages", "errors.py", "import torch"),
    ("plan_reads_no_tensor_clock_or_file", "plan/a.py", "from time import monotonic"),
    ("plan_reads_no_tensor_clock_or_file", "plan/a.py", "import torch.nn"),
    ("plan_reads_no_tensor_clock_or_file", "plan/a.py", "def f(p):\n    return open(p)"),
    ("hugging_face_has_one_home", "engine/a.py", "def f():\n    import transformers.cache_utils"),
    ("hugging_face_has_one_home", "engine/a.py", "from transformers import AutoModel"),
    ("frameworks_are_for_few_doors", "engine/a.py", "def f():\n    import langchain_core.documents"),
    ("frameworks_are_for_few_doors", "models/loader.py", "def f():\n    import sentence_transformers"),
    ("frameworks_are_for_few_doors", "text/a.py", "def f():\n    from llama_index.core import Document"),
    ("extras_are_imported_lazily", "cli/a.py", "from langchain_ragfuse import ChatRagFuse"),
    ("extras_are_imported_lazily", "calibration/a.py", "if True:\n    import matplotlib.pyplot"),
    ("extras_are_imported_lazily", "cli/serve.py", "from fastapi import FastAPI"),
    ("extras_are_imported_lazily", "serve/a.py", "import prometheus_client"),
    ("extras_are_imported_lazily", "engine/a.py", "import httpx"),
    ("extras_are_imported_lazily", "remote/a.py", "import fastapi"),
    ("extras_are_imported_lazily", "ray/a.py", "import ray"),
    ("nothing_unpickles", "store/a.py", "import pickle"),
    ("nothing_unpickles", "store/a.py", "from torch import load"),
    ("nothing_unpickles", "store/a.py", "import torch\ntorch.load('x')"),
    ("nothing_unpickles", "store/a.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    ("modules_hold_no_mutable_state", "types/a.py", "CACHE = {}"),
    ("modules_hold_no_mutable_state", "types/a.py", "CACHE: dict[str, int] = dict()"),
    ("modules_hold_no_mutable_state", "types/a.py", "if True:\n    PAIR = (1, [2])"),
    ("modules_hold_no_mutable_state", "types/a.py", "import threading\n_lock = threading.Lock()"),
    ("modules_hold_no_mutable_state", "types/a.py", "N = 0\ndef f():\n    global N\n    N = 1"),
    ("no_open_keywords_below_the_engine", "store/a.py", "def f(**options): ..."),
    ("no_open_keywords_below_the_engine", "hf/a.py", "def f(model, **options):\n    model(**options)"),
    ("files_are_short", "types/a.py", "x = 1\n" * (MAX_LINES + 1)),
    ("what_is_public_says_what_it_gives", "types/a.py", '"""Doc."""\ndef f(): ...'),
    ("what_is_public_says_what_it_gives", "types/a.py", '"""Doc."""\nclass A:\n    """A."""\n    def f(self): ...'),
    ("what_is_public_says_what_it_gives", "types/a.py", "def _f(): ..."),
]

GOOD = [
    (
        "rooms_import_only_what_stands_below",
        "load/a.py",
        "from ragfuse.plan import stream_level\nfrom ragfuse import types",
    ),
    (
        "rooms_import_only_what_stands_below",
        "load/a.py",
        "from ragfuse.plan.stream_level import level\nfrom .b import c",
    ),
    ("rooms_import_only_what_stands_below", "__init__.py", "from ragfuse.engine.engine import Engine"),
    ("hugging_face_has_one_home", "models/loader.py", "from transformers import AutoModel"),
    ("frameworks_are_for_few_doors", "calibration/a.py", "def f():\n    import langchain_core"),
    ("frameworks_are_for_few_doors", "models/embedder.py", "def f():\n    import sentence_transformers"),
    ("extras_are_imported_lazily", "cli/a.py", "def f():\n    import matplotlib.pyplot"),
    ("extras_are_imported_lazily", "serve/a.py", "import uvicorn"),
    ("extras_are_imported_lazily", "remote/a.py", "import httpx"),
    ("modules_hold_no_mutable_state", "types/a.py", "__all__ = ['A']\nA = MappingProxyType({'a': 1})\nB = (1, 2)"),
    ("no_open_keywords_below_the_engine", "hf/a.py", "def attention(q, **options):\n    return options.get('x')"),
    ("no_open_keywords_below_the_engine", "hf/a.py", "@wraps(g)\ndef f(**options):\n    return g(**options)"),
    ("what_is_public_says_what_it_gives", "types/a.py", '"""Doc."""\ndef f():\n    """F."""\n    def g(): ...'),
]


@cache
def _sources(folder: str, below: Path) -> list[Source]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(below).as_posix(), path.read_text(encoding="utf-8")) for path in files]


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
    packages = [source for source in _sources("ragfuse", below=ROOT / "ragfuse") if source.path.endswith("__init__.py")]
    lines = {each.path: len((ast.get_docstring(each.tree) or "").splitlines()) for each in packages}
    assert {path: n for path, n in lines.items() if not 1 <= n <= 4} == {}


def _modules() -> dict[str, Source]:
    """All modules of ragfuse by their dotted names."""
    sources = _sources("ragfuse", below=ROOT / "ragfuse")
    return {
        f"ragfuse.{source.path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): source
        for source in sources
    }


def _imported(modules: dict[str, Source]) -> dict[str, set[str]]:
    """The modules that each module imports, wherever in it."""
    found: dict[str, set[str]] = {}
    for name, source in modules.items():
        paths = [item.path for item in source.imports if item.root == "ragfuse"]
        found[name] = {path if path in modules else path.rpartition(".")[0] for path in paths} & set(modules) - {name}
    return found


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or in a round."""
    found = []
    for name in imported:
        seen, left = set[str](), [*imported[name]]
        while left:
            each = left.pop()
            if each not in seen:
                seen.add(each)
                left += imported.get(each, ())
        if name in seen:
            found.append(sorted({name, *(each for each in seen if name in _reached(imported, each))}))
    return found


def _reached(imported: dict[str, set[str]], name: str) -> set[str]:
    seen, left = set[str](), [*imported.get(name, ())]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += imported.get(each, ())
    return seen


def test_no_modules_import_each_other() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert circles(_imported(_modules())) == []


def test_no_packages_import_each_other() -> None:
    pairs = set()
    for name, targets in _imported(_modules()).items():
        mine = name.split(".")[1:2]
        pairs |= {
            (*mine, *theirs) for target in targets if (theirs := target.split(".")[1:2]) != mine and mine and theirs
        }
    assert sorted(pair for pair in pairs if pair[::-1] in pairs) == []


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
    engine = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Engine")
    public = [each.name for each in engine.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
    assert len(public) <= 20, public


def test_integrations_stand_on_public_names_only() -> None:
    sources = [source for source in _sources("integrations", below=ROOT) if "/tests/" not in source.path]
    assert len(sources) >= 2
    assert [f"{source.path}: {found}" for source in sources for found in integrations_use_public_names(source)] == []


@pytest.mark.parametrize("rule", [nothing_unpickles, files_are_short])
def test_integrations_keep_the_rule(rule: Rule) -> None:
    sources = [source for source in _sources("integrations", below=ROOT) if "/tests/" not in source.path]
    assert [f"{source.path}: {found}" for source in sources for found in rule(source)] == []


@pytest.mark.parametrize(
    "text", ["from ragfuse.store import KVStore", "from ragfuse import _hidden", "import ragfuse\nragfuse.hf.load()"]
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
        r"(?<![\w.])(?:" + "|".join([*places, "/(?:work|home|Users|root)/[a-z]+", "/tmp/[a-z]+/"]) + ")"
    )
    assert pattern.search("cd " + "/home" + "/someone/x")
    found = {path: pattern.search(path.read_text(encoding="utf-8", errors="replace")) for path in _text_files()}
    assert {str(path.relative_to(ROOT)): match.group() for path, match in found.items() if match} == {}


def test_every_test_that_holds_a_promise_is_there() -> None:
    from tests.promises import PROMISES

    files = {test.partition("::")[0] for tests in PROMISES.values() for test in tests}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
