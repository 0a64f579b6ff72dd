"""Compile Python functions to schemas. A call of such a prompt function returns a prompt over the
function's schema (Prompt Cache 3.2.4).

A string statement becomes text. A parameter in an f-string becomes a PML parameter. `if` becomes a
module. `if`/`else` and `match` become a union. A call of another prompt function becomes a nested
module. `with user:` becomes a message. The docstring is ignored. Any other statement raises a
PMLError when the function is defined. Conditions are evaluated at each call, and the returned
prompt imports the module of the branch that is taken.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import chain, count
from types import FunctionType
from typing import Any, ParamSpec, cast

from ragfuse.errors import PMLError
from ragfuse.schemas.nodes import (
    Import,
    Item,
    Module,
    Param,
    PMLPrompt,
    Role,
    RoleName,
    Schema,
    SourcePosition,
    TextNode,
    Union,
    joined,
)
from ragfuse.schemas.pml import PML_TAGS, is_name

P = ParamSpec("P")
_PML = "__pml__"
"""Name of a compiled function's schema attribute, and of the recorder variable in its code."""
_DEF = "a function written with def"
_SAYS = (
    "strings, f-strings of parameters, if, match, `with user:` (system, assistant), calls of prompt"
    " functions"
)


@dataclass(frozen=True)
class MaxTokens:
    """Maximum tokens of an argument, as in `days: Annotated[str, MaxTokens(8)]`."""

    n: int


@dataclass(frozen=True)
class MessageBlock(nullcontext[None]):
    """A `with` block in a prompt function. The block's text becomes a message with this role."""

    role: RoleName


system, user, assistant = MessageBlock("system"), MessageBlock("user"), MessageBlock("assistant")


def program(function: Callable[P, Any]) -> Callable[P, PMLPrompt]:
    """Decorate a prompt function, so that a call returns a `PMLPrompt`.

    `schema_of` returns the function's schema. Parameters in texts need a `MaxTokens` annotation.

    Raises:
        PMLError: The function cannot be compiled. The error names file and line.
    """
    return _Compiler(function).compiled()


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema of a prompt function. PMLError for any other function."""
    found = getattr(function, _PML, None)
    if not isinstance(found, Schema):
        raise PMLError(f"{function!r}", "a function that is decorated with `program`")
    return found


class _Recorder:
    """The arguments and imports of one call, recorded by the compiled code."""

    def __init__(self) -> None:
        self.args: dict[str, str] = {}
        self.imports: list[Import] = []

    def fill(self, name: str, value: object) -> None:
        """Record a parameter's value for the module that is being recorded."""
        self.args[name] = str(value)

    def call(self, name: str, request: PMLPrompt) -> None:
        """Record a call of another prompt function as the import of a module."""
        self.imports.append(Import(name, request.args, request.items))

    @contextmanager
    def into(self, name: str) -> Iterator[None]:
        """Record the import of a module. The `with` block records the import's content."""
        outer = self.args, self.imports
        self.args, self.imports = {}, []
        yield
        found = Import(name, tuple(self.args.items()), tuple(self.imports))
        self.args, self.imports = outer
        self.imports.append(found)


_Compiled = tuple[Sequence[Item], Sequence[ast.stmt]]
"""Schema items, and AST statements that record the arguments and imports of a call."""


class _Compiler:
    """Compiles one function to a schema, and to a function that returns prompts over the schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType):
            raise PMLError(f"{function!r}", _DEF)
        self.function = function
        self.file, self.first_line = function.__code__.co_filename, function.__code__.co_firstlineno
        self.definition = self._definition()
        self.outer_values = _values_around(function)
        self.parameters = set(inspect.signature(function).parameters)
        hints = inspect.get_annotations(function, locals=self.outer_values, eval_str=True)
        annotated = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
        self.max_tokens = {
            name: each.n
            for name, extras in annotated
            for each in extras
            if isinstance(each, MaxTokens)
        }

    def compiled(self) -> Callable[..., PMLPrompt]:
        """Return the compiled function, which has the schema as an attribute."""
        has_docstring = ast.get_docstring(self.definition, clean=False) is not None
        items, body = self._body(self.definition.body[has_docstring:], set())
        if not items:
            raise self._error(
                self.definition, "a function without text besides its docstring", "some text"
            )
        schema = Schema(self.function.__name__, joined(items), at=self._spot(self.definition))
        original, signature = self.function, inspect.signature(self.function)
        code = compile(ast.fix_missing_locations(ast.Module(list(body), [])), self.file, "exec")

        @wraps(original)
        def prompt_of(*args: Any, **kwargs: Any) -> PMLPrompt:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            told = _Recorder()
            exec(code, {**_values_around(original), **given.arguments, _PML: told})
            return PMLPrompt(schema.name, tuple(told.imports), tuple(told.args.items()))

        setattr(prompt_of, _PML, schema)
        return prompt_of

    # parsing the function

    def _definition(self) -> ast.FunctionDef:
        try:
            source = inspect.getsource(self.function)
            is_inside = source[
                :1
            ].isspace()  # defined in an indented block, whose texts keep their indentation
            found = ast.parse(f"if True:\n{source}" if is_inside else source).body[0]
        except (OSError, SyntaxError) as error:
            raise PMLError(
                f"no readable source ({error})",
                "a def in a file or notebook",
                self.file,
                self.first_line,
            ) from error
        found = cast(ast.If, found).body[0] if is_inside else found
        if not isinstance(found, ast.FunctionDef):
            raise PMLError(f"'{source.strip()[:40]}'", _DEF, self.file, self.first_line, 1)
        return ast.increment_lineno(found, self.first_line - 1 - is_inside)

    def _spot(self, node: ast.stmt | ast.expr) -> SourcePosition:
        return SourcePosition(self.file, node.lineno, node.col_offset + 1)

    def _error(self, node: ast.stmt | ast.expr, found: str, wanted: str) -> PMLError:
        return self._spot(node).error(found, wanted)

    def _value(self, node: ast.expr) -> Any:
        """Return the value that a name or attribute has when the function is defined, or None."""
        if isinstance(node, ast.Name):
            return None if node.id in self.parameters else self.outer_values.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        return None

    # statements

    def _body(self, body: Sequence[ast.stmt], names: set[str]) -> _Compiled:
        parts = [self._statement(node, names) for node in body]
        return [item for items, _ in parts for item in items], [
            step for _, steps in parts for step in steps
        ]

    def _statement(self, node: ast.stmt, names: set[str]) -> _Compiled:
        match node:
            case ast.Pass():
                return (), ()
            case ast.Expr(ast.Call() as call):
                return self._call(call, names)
            case ast.Expr(value):
                return self._text(value)
            case ast.If() | ast.Match():
                return self._choice(node, names)
            case ast.With(items=[ast.withitem(opened, None)]) if isinstance(
                self._value(opened), MessageBlock
            ):
                items, steps = self._body(node.body, names)
                return [Role(self._value(opened).role, joined(items), at=self._spot(node))], steps
        raise self._error(
            node, f"'{ast.unparse(node).splitlines()[0][:60]}' in a prompt function", _SAYS
        )

    def _text(self, node: ast.expr) -> _Compiled:
        """Compile a string, an f-string, or a name whose value is a string."""
        items, steps = list[Item](), list[ast.stmt]()
        for part in node.values if isinstance(node, ast.JoinedStr) else (node,):
            plain = part.value if isinstance(part, ast.FormattedValue) else part
            has_format = isinstance(part, ast.FormattedValue) and (
                part.conversion != -1 or part.format_spec
            )
            value = plain.value if isinstance(plain, ast.Constant) else self._value(plain)
            if (
                isinstance(plain, ast.Name)
                and plain.id in self.parameters
                and part is not plain
                and not has_format
            ):
                if plain.id not in self.max_tokens:
                    wanted = f"{plain.id}: Annotated[str, MaxTokens(...)]"
                    raise self._error(
                        plain, f"parameter '{plain.id}' without a maximum length", wanted
                    )
                items.append(Param(plain.id, self.max_tokens[plain.id], at=self._spot(plain)))
                steps += ast.parse(f"{_PML}.fill({plain.id!r}, {plain.id})").body
            elif isinstance(value, str) and not has_format:
                items += [TextNode(value, at=self._spot(plain))] if value else []
            else:
                raise self._error(plain, f"'{ast.unparse(part)[:60]}' in a prompt function", _SAYS)
        return items, steps

    def _call(self, node: ast.Call, names: set[str]) -> _Compiled:
        schema = getattr(self._value(node.func), _PML, None)
        if not isinstance(schema, Schema):
            found = f"a call of '{ast.unparse(node.func)[:60]}'"
            raise self._error(node, found, "a call of a prompt function defined earlier")
        name = _unique(schema.name, names)
        step = cast(ast.Expr, ast.parse(f"{_PML}.call({name!r})").body[0])
        cast(ast.Call, step.value).args.append(node)
        return [Module(name, schema.items, at=self._spot(node))], [step]

    def _choice(self, node: ast.If | ast.Match, names: set[str]) -> _Compiled:
        """Compile each branch to a module. The compiled code imports the taken branch's module."""
        modules = list[Module]()

        def taken(wanted: str, body: Sequence[ast.stmt]) -> list[ast.stmt]:
            name = _unique(wanted, names)
            items, steps = self._body(body, set())
            modules.append(Module(name, joined(items), at=self._spot(body[0])))
            block = cast(ast.With, ast.parse(f"with {_PML}.into({name!r}): pass").body[0])
            block.body += steps
            return [block]

        if isinstance(node, ast.Match):
            for case in node.cases:
                case.body = taken(ast.unparse(case.pattern), case.body)
        else:
            branches: list[ast.stmt] = [node]
            while len(branches) == 1 and isinstance(branch := branches[0], ast.If):
                branch.body = taken(ast.unparse(branch.test), branch.body)
                branches, last = branch.orelse, branch
            if branches:
                last.orelse = taken("else", branches)
            if len(modules) == 1:
                return modules, [node]
        return [Union(tuple(modules), at=self._spot(node))], [node]


def _unique(wanted: str, taken: set[str]) -> str:
    """Return an unused module name, as close to `wanted` as PML allows."""
    name = re.sub(r"[^\w.-]+", "-", wanted).strip("-._")[:40]
    if not is_name(name) or name in PML_TAGS:
        name = f"case-{name}".strip("-")
    found = next(
        each for each in chain([name], (f"{name}-{n}" for n in count(2))) if each not in taken
    )
    taken.add(found)
    return found


def _values_around(function: FunctionType) -> dict[str, Any]:
    """Return a function's globals, and its closure variables that have a value, by name."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found
