"""Prompt functions: Python functions compiled to a schema, which return a prompt over it (Prompt Cache 3.2.4).

A string statement is text, the parameters in an f-string are PML parameters, `if` is a module, `if` with `else` and
`match` are a union, a call of another prompt function is a nested module, and `with user:` is a message. The docstring
is ignored. Anything else raises a PMLError with its line when the function is defined. Conditions are evaluated when
the function is called.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any, ParamSpec, cast, overload

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
_DEF = "a function written with def"
_SAYS = "strings, f-strings of parameters, if, match, `with` system, user or assistant, or calls of prompt functions"


@dataclass(frozen=True)
class MaxTokens:
    """The most tokens of an argument: `days: Annotated[str, MaxTokens(8)]`."""

    n: int


@dataclass(frozen=True)
class MessageBlock:
    """A message of this role, as the context of a `with` block in a prompt function."""

    role: RoleName

    def __enter__(self) -> None:
        """Do nothing; never called, as prompt functions are compiled."""

    def __exit__(self, *_: object) -> None:
        """Do nothing; never called either."""


system, user, assistant = MessageBlock("system"), MessageBlock("user"), MessageBlock("assistant")


@overload
def program(function: Callable[P, Any]) -> Callable[P, PMLPrompt]: ...


@overload
def program(*, max_tokens: Mapping[str, int]) -> Callable[[Callable[P, Any]], Callable[P, PMLPrompt]]: ...


def program(
    function: Callable[..., Any] | None = None, *, max_tokens: Mapping[str, int] | None = None
) -> Callable[..., Any]:
    """Decorate a function as a prompt function, which returns a prompt; `schema_of` returns its schema.

    Args:
        function: The function.
        max_tokens: The most tokens of each parameter that its texts contain; or annotate it with `MaxTokens`.

    Raises:
        PMLError: The function cannot be compiled; with file and line.
    """
    if function is None:
        return lambda function: _Compiler(function, max_tokens or {}).compiled()
    return _Compiler(function, max_tokens or {}).compiled()


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema of a prompt function; raises PMLError for any other function."""
    found = getattr(function, _PML, None)
    if not isinstance(found, Schema):
        raise PMLError(f"{function!r}", "a function that is decorated with `program`")
    return found


class _CallRecord:
    """A record of the arguments and imports of one module, made during a call of a prompt function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.args: dict[str, str] = {}
        self.items: list[Import | _CallRecord] = []

    def module(self, name: str) -> _CallRecord:
        """Record that a branch was taken, and return the record of its module."""
        self.items.append(record := _CallRecord(name))
        return record

    def argument(self, name: str, value: object) -> None:
        """Record the value of a parameter."""
        self.args[name] = str(value)

    def called(self, name: str, request: PMLPrompt) -> None:
        """Record a call of another prompt function, which returned `request`."""
        self.items.append(Import(name, request.args, request.items))

    def imports(self) -> tuple[Import, ...]:
        """Return all recorded imports, in order."""
        return tuple(item if isinstance(item, Import) else item.as_import() for item in self.items)

    def as_import(self) -> Import:
        """Return this record as an import of a nested module."""
        return Import(self.name, tuple(self.args.items()), self.imports())

    def request(self) -> PMLPrompt:
        """Return this record as a whole prompt."""
        return PMLPrompt(self.name, self.imports(), tuple(self.args.items()))


@dataclass
class _Scope:
    """A module that is being compiled: the variable that holds its record, and the names used in it."""

    variable: str
    names: set[str] = field(default_factory=set)

    def unique(self, wanted: str) -> str:
        """Return an unused name for a nested module, as close to `wanted` as PML allows."""
        name = re.sub(r"[^\w.-]+", "-", wanted).strip("-.")[:40]
        if not is_name(name) or name in PML_TAGS:
            name = f"case-{name}" if is_name(f"case-{name}") else "case"
        found, n = name, 1
        while found in self.names:
            n += 1
            found = f"{name}-{n}"
        self.names.add(found)
        return found


class _Compiler:
    """A compiler of one function to a schema and to a function that returns a prompt over it."""

    def __init__(self, function: Callable[..., Any], max_tokens: Mapping[str, int]) -> None:
        if not isinstance(function, FunctionType):
            raise PMLError(f"{function!r}", _DEF)
        self.function, self.n_scopes = function, 0
        self.file, self.first_line = function.__code__.co_filename, function.__code__.co_firstlineno
        self.definition = self._definition()
        self.outer_values = {**function.__globals__, **_closure(function)}
        arguments = self.definition.args
        self.parameters = {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self.max_tokens = {**self._annotated(), **max_tokens}
        for name in max_tokens:
            if name not in self.parameters:
                raise self._error(self.definition, f"max_tokens of '{name}'", "a parameter of the function")

    def compiled(self) -> Callable[..., PMLPrompt]:
        """Return the compiled function, with its schema as an attribute."""
        scope = self._scope()
        body = self.definition.body
        items, statements = self._body(body[1:] if ast.get_docstring(self.definition, clean=False) else body, scope)
        if not items:
            raise self._error(
                self.definition, "a function without text besides its docstring", "a string as a statement"
            )
        schema = Schema(self.function.__name__, joined(items), at=self._spot(self.definition))
        function = self._function(scope, statements)
        update_wrapper(function, self.function)
        setattr(function, _PML, schema)
        return cast(Callable[..., PMLPrompt], function)

    # reading the function

    def _definition(self) -> ast.FunctionDef:
        try:
            source = inspect.getsource(self.function)
        except OSError as error:
            wanted = "one that is defined in a file"
            raise PMLError("a function without source", wanted, self.file, self.first_line) from error
        is_inside = source[:1].isspace()  # defined in another block: the source and its texts keep their indentation
        try:
            body: Sequence[ast.stmt] = ast.parse(f"if True:\n{source}" if is_inside else source).body
        except SyntaxError as error:
            raise PMLError(f"source that cannot be read ({error.msg})", _DEF, self.file, self.first_line) from error
        body = cast(ast.If, body[0]).body if is_inside else body
        found = body[0] if body else None
        if not isinstance(found, ast.FunctionDef):
            raise PMLError(f"'{source.strip()[:40]}'", _DEF, self.file, self.first_line, 1)
        return ast.increment_lineno(found, self.first_line - 1 - is_inside)

    def _annotated(self) -> dict[str, int]:
        try:
            hints = inspect.get_annotations(self.function, locals=_closure(self.function), eval_str=True)
        except Exception as error:  # an annotation may be anything
            raise self._error(self.definition, f"an annotation that cannot be read ({error})", "types") from error
        max_tokens = {}
        for name, hint in hints.items():
            for each in getattr(hint, "__metadata__", ()):  # of Annotated
                if isinstance(each, MaxTokens):
                    max_tokens[name] = each.n
        return max_tokens

    def _spot(self, node: ast.AST) -> SourcePosition:
        return SourcePosition(self.file, getattr(node, "lineno", self.first_line), getattr(node, "col_offset", 0) + 1)

    def _error(self, node: ast.AST, found: str, wanted: str) -> PMLError:
        return self._spot(node).error(found, wanted)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a name, or of an attribute, where the function was defined; None if it is unknown."""
        if isinstance(node, ast.Name):
            return None if node.id in self.parameters else self.outer_values.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        return None

    # statements

    def _scope(self) -> _Scope:
        self.n_scopes += 1
        return _Scope(f"__record_{self.n_scopes}")

    def _body(self, body: Sequence[ast.stmt], scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        items, recording = list[Item](), list[ast.stmt]()
        for node in body:
            node_items, recording_of_node = self._statement(node, scope)
            items += node_items
            recording += [ast.copy_location(statement, node) for statement in recording_of_node]
        return items, recording

    def _statement(self, node: ast.stmt, scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        match node:
            case ast.Pass():
                return [], []
            case ast.Expr(ast.Call() as call):
                return self._call(call, scope)
            case ast.Expr(value):
                return self._text(value, scope)
            case ast.If():
                return self._if(node, scope)
            case ast.Match():
                return self._match(node, scope)
            case ast.With(items=[ast.withitem(opened, None)]) if isinstance(self._value(opened), MessageBlock):
                items, recording = self._body(node.body, scope)
                return [Role(self._value(opened).role, joined(items), self._spot(node))], recording
            case _:
                raise self._error(node, f"'{ast.unparse(node).splitlines()[0][:60]}' in a prompt function", _SAYS)

    def _text(self, node: ast.expr, scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        """Compile a string, an f-string, or a name whose value is a string."""
        value = node.value if isinstance(node, ast.Constant) else self._value(node)
        if isinstance(value, str):
            return [TextNode(value, self._spot(node))] if value else [], []
        if not isinstance(node, ast.JoinedStr):
            raise self._error(node, f"'{ast.unparse(node)[:60]}' in a prompt function", _SAYS)
        items, recording = list[Item](), list[ast.stmt]()
        for part in node.values:
            value_expr = part.value if isinstance(part, ast.FormattedValue) else part
            if isinstance(part, ast.FormattedValue) and (part.conversion != -1 or part.format_spec is not None):
                raise self._error(
                    value_expr, f"'{ast.unparse(value_expr)[:60]}' with a format", "it without ':' or '!'"
                )
            if isinstance(value_expr, ast.Name) and value_expr.id in self.parameters:
                items.append(self._param(value_expr))
                name = value_expr.id
                recording.append(_do(scope, "argument", ast.Constant(name), ast.Name(name, ast.Load())))
                continue
            if not isinstance(value_expr, ast.Constant) and not isinstance(self._value(value_expr), str):
                found = f"'{ast.unparse(value_expr)[:60]}' in a text"
                raise self._error(value_expr, found, "a parameter of the function")
            items += self._text(value_expr, scope)[0]
        return items, recording

    def _param(self, node: ast.Name) -> Param:
        if node.id not in self.max_tokens:
            wanted = f"max_tokens={{'{node.id}': ...}}, or Annotated[str, MaxTokens(...)]"
            raise self._error(node, f"parameter '{node.id}' without a maximum length", wanted)
        length = self.max_tokens[node.id]
        if not is_name(node.id) or node.id == "schema" or length < 1:
            raise self._error(
                node, f"parameter '{node.id}' of {length} tokens", "at least 1 token, and a name that PML allows"
            )
        return Param(node.id, length, at=self._spot(node))

    def _call(self, node: ast.Call, scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        schema = getattr(self._value(node.func), _PML, None)
        if not isinstance(schema, Schema):
            raise self._error(
                node, f"a call of '{ast.unparse(node.func)[:60]}'", "a call of a prompt function defined before"
            )
        name = scope.unique(schema.name)
        return [Module(name, schema.items, at=self._spot(node))], [_do(scope, "called", ast.Constant(name), node)]

    def _if(self, node: ast.If, scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        modules: list[Module] = []
        statement = self._branches(node, scope, modules)
        whole = modules[0] if len(modules) == 1 else Union(tuple(modules), at=self._spot(node))
        return [whole], [statement]

    def _branches(self, node: ast.If, scope: _Scope, modules: list[Module]) -> ast.stmt:
        """Return the `if` with statements that record the branch taken, and add each branch to `modules`."""
        if_body = self._branch(_called(node.test), node.body, node, scope, modules)
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            else_body = [self._branches(node.orelse[0], scope, modules)]
        else:
            else_body = self._branch("else", node.orelse, node.orelse[0], scope, modules) if node.orelse else []
        return ast.copy_location(ast.If(node.test, if_body, else_body), node)

    def _match(self, node: ast.Match, scope: _Scope) -> tuple[list[Item], list[ast.stmt]]:
        modules: list[Module] = []
        cases = [
            ast.match_case(
                case.pattern, case.guard, self._branch(_cased(node, case), case.body, case.body[0], scope, modules)
            )
            for case in node.cases
        ]
        return [Union(tuple(modules), at=self._spot(node))], [ast.Match(node.subject, cases)]

    def _branch(
        self, wanted: str, body: Sequence[ast.stmt], at: ast.AST, scope: _Scope, modules: list[Module]
    ) -> list[ast.stmt]:
        name, inner_scope = scope.unique(wanted), self._scope()
        items, recording = self._body(body, inner_scope)
        modules.append(Module(name, joined(items), at=self._spot(at)))
        new_record = _do(scope, "module", ast.Constant(name)).value
        open_record = ast.Assign([ast.Name(inner_scope.variable, ast.Store())], new_record)
        return [open_record, *recording]

    # writing the compiled function

    def _function(self, scope: _Scope, recording: list[ast.stmt]) -> FunctionType:
        """Return a function with the same parameters, globals and closure that records and returns its prompt."""
        free = ("__record__", *self.function.__code__.co_freevars)
        maker = ast.parse(f"def make({', '.join(free)}): pass")
        open_record = ast.parse(f"{scope.variable} = __record__({self.function.__name__!r})").body
        definition = self.definition
        definition.decorator_list, definition.returns = [], None
        for each in ast.walk(definition.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
        definition.args.kw_defaults = [each and ast.Constant(None) for each in definition.args.kw_defaults]
        answer = ast.Return(_do(scope, "request").value)
        definition.body = [*open_record, *recording, answer]
        outer = cast(ast.FunctionDef, maker.body[0])
        outer.body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
        namespace: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(maker), self.file, "exec"), self.function.__globals__, namespace)
        code = namespace["make"](*free).__code__
        cells = dict(zip(free, (CellType(_CallRecord), *(self.function.__closure__ or ())), strict=True))
        closure, original = tuple(cells[name] for name in code.co_freevars), self.function
        function = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
        function.__kwdefaults__ = original.__kwdefaults__
        return function


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the values in a function's closure, except for those not assigned yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not there yet
            continue
    return found


def _do(scope: _Scope, method: str, *args: ast.expr) -> ast.Expr:
    attribute = ast.Attribute(ast.Name(scope.variable, ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(attribute, list(args), []))


def _called(test: ast.expr) -> str:
    """Return a name for the module of a condition."""
    match test:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case ast.UnaryOp(ast.Not(), inner):
            return f"not-{_called(inner)}"
        case ast.Compare(left, [ast.Eq()], [ast.Constant(value)]):
            return "-".join((_called(left), str(value)))
        case _:
            return "if"


def _cased(node: ast.Match, case: ast.match_case) -> str:
    """Return a name for the module of a `case`."""
    match case.pattern:
        case ast.MatchValue(ast.Constant(value)) | ast.MatchSingleton(value):
            return str(value)
        case ast.MatchOr(patterns):
            return "-or-".join(_cased(node, ast.match_case(pattern, None, [])) for pattern in patterns)
        case ast.MatchAs(None, None):
            return f"other-{_called(node.subject)}"
        case _:
            return "case"
