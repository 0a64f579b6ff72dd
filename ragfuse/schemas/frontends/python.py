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
from dataclasses import dataclass
from functools import wraps
from itertools import chain, count
from types import CodeType, FunctionType
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
_PML, _TAKEN = "__pml__", "__taken__"
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


@dataclass(frozen=True)
class _Call:
    """A call of another prompt function, which the module `name` stands for."""

    name: str
    code: CodeType


@dataclass(frozen=True)
class _Choice:
    """An `if` or `match` whose code sets `_TAKEN` to the index of the branch that is taken."""

    code: CodeType
    branches: Sequence[tuple[str, _Steps]]


_Steps = Sequence[str | _Call | _Choice]
"""What a call does in one module: parameters that are filled, calls and choices, in order."""


def _recorded(steps: _Steps, values: dict[str, Any]) -> tuple[dict[str, str], tuple[Import, ...]]:
    """Return the arguments and imports of one module in a call with these values of all names."""
    args, imports = dict[str, str](), list[Import]()
    for step in steps:
        match step:
            case str():
                args[step] = str(values[step])
            case _Call(name, code):
                request: PMLPrompt = eval(code, values)
                imports.append(Import(name, request.args, request.items))
            case _Choice(code, branches):
                values[_TAKEN] = None
                exec(code, values)
                if values[_TAKEN] is not None:
                    name, inside = branches[values[_TAKEN]]
                    inner_args, inner_imports = _recorded(inside, values)
                    imports.append(Import(name, tuple(inner_args.items()), inner_imports))
    return args, tuple(imports)


class _Names:
    """The names of the modules of one scope."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def unique(self, wanted: str) -> str:
        """Return an unused name for a nested module, as close to `wanted` as PML allows."""
        name = re.sub(r"[^\w.-]+", "-", wanted).strip("-.")[:40]
        if not is_name(name) or name in PML_TAGS:
            name = f"case-{name}" if is_name(f"case-{name}") else "case"
        numbered = (f"{name}-{n}" for n in count(2))
        found = next(each for each in chain([name], numbered) if each not in self._names)
        self._names.add(found)
        return found


class _Compiler:
    """A compiler of one function to a schema and to a function that returns a prompt over it."""

    def __init__(self, function: Callable[..., Any], max_tokens: Mapping[str, int]) -> None:
        if not isinstance(function, FunctionType):
            raise PMLError(f"{function!r}", _DEF)
        self.function = function
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
        body = self.definition.body
        has_docstring = ast.get_docstring(self.definition, clean=False) is not None
        items, steps = self._body(body[has_docstring:], _Names())
        if not items:
            found = "a function without text besides its docstring"
            raise self._error(self.definition, found, "a string as a statement")
        schema = Schema(self.function.__name__, joined(items), at=self._spot(self.definition))
        original, signature = self.function, inspect.signature(self.function)

        @wraps(original)
        def prompt_of(*args: Any, **kwargs: Any) -> PMLPrompt:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = {**original.__globals__, **_closure(original), **given.arguments}
            own, imports = _recorded(steps, values)
            return PMLPrompt(schema.name, imports, tuple(own.items()))

        setattr(prompt_of, _PML, schema)
        return prompt_of

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

    def _body(self, body: Sequence[ast.stmt], names: _Names) -> tuple[list[Item], _Steps]:
        items, steps = list[Item](), list[str | _Call | _Choice]()
        for node in body:
            node_items, node_steps = self._statement(node, names)
            items += node_items
            steps += node_steps
        return items, steps

    def _statement(self, node: ast.stmt, names: _Names) -> tuple[Sequence[Item], _Steps]:
        match node:
            case ast.Pass():
                return [], []
            case ast.Expr(ast.Call() as call):
                return self._call(call, names)
            case ast.Expr(value):
                return self._text(value)
            case ast.If() | ast.Match():
                return self._choice(node, names)
            case ast.With(items=[ast.withitem(opened, None)]) if isinstance(self._value(opened), MessageBlock):
                items, steps = self._body(node.body, names)
                return [Role(self._value(opened).role, joined(items), self._spot(node))], steps
            case _:
                found = f"'{ast.unparse(node).splitlines()[0][:60]}' in a prompt function"
                raise self._error(node, found, _SAYS)

    def _text(self, node: ast.expr) -> tuple[list[Item], list[str]]:
        """Compile a string, an f-string, or a name whose value is a string."""
        value = node.value if isinstance(node, ast.Constant) else self._value(node)
        if isinstance(value, str):
            return [TextNode(value, self._spot(node))] if value else [], []
        if not isinstance(node, ast.JoinedStr):
            raise self._error(node, f"'{ast.unparse(node)[:60]}' in a prompt function", _SAYS)
        items, filled = list[Item](), list[str]()
        for part in node.values:
            value_expr = part.value if isinstance(part, ast.FormattedValue) else part
            if isinstance(part, ast.FormattedValue) and (part.conversion != -1 or part.format_spec is not None):
                raise self._error(
                    value_expr, f"'{ast.unparse(value_expr)[:60]}' with a format", "it without ':' or '!'"
                )
            if isinstance(value_expr, ast.Name) and value_expr.id in self.parameters:
                items.append(self._param(value_expr))
                filled.append(value_expr.id)
                continue
            if not isinstance(value_expr, ast.Constant) and not isinstance(self._value(value_expr), str):
                found = f"'{ast.unparse(value_expr)[:60]}' in a text"
                raise self._error(value_expr, found, "a parameter of the function")
            items += self._text(value_expr)[0]
        return items, filled

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

    def _call(self, node: ast.Call, names: _Names) -> tuple[list[Item], _Steps]:
        schema = getattr(self._value(node.func), _PML, None)
        if not isinstance(schema, Schema):
            found = f"a call of '{ast.unparse(node.func)[:60]}'"
            raise self._error(node, found, "a call of a prompt function defined before")
        name, code = names.unique(schema.name), compile(ast.Expression(node), self.file, "eval")
        return [Module(name, schema.items, at=self._spot(node))], [_Call(name, code)]

    def _choice(self, node: ast.If | ast.Match, names: _Names) -> tuple[list[Item], _Steps]:
        """Compile every branch to a module, and the choice to code that says which one is taken."""
        modules, branches = list[Module](), list[tuple[str, _Steps]]()

        def taken(wanted: str, body: Sequence[ast.stmt], at: ast.AST) -> list[ast.stmt]:
            name = names.unique(wanted)
            items, steps = self._body(body, _Names())
            modules.append(Module(name, joined(items), at=self._spot(at)))
            branches.append((name, steps))
            return ast.parse(f"{_TAKEN} = {len(branches) - 1}").body

        def chosen(node: ast.If) -> ast.If:
            body, other = taken(_called(node.test), node.body, node), list[ast.stmt]()
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                other = [chosen(node.orelse[0])]
            elif node.orelse:
                other = taken("else", node.orelse, node.orelse[0])
            return ast.copy_location(ast.If(node.test, body, other), node)

        statement: ast.stmt
        if isinstance(node, ast.If):
            statement = chosen(node)
        else:
            cases = [
                ast.match_case(case.pattern, case.guard, taken(_cased(node, case), case.body, case.body[0]))
                for case in node.cases
            ]
            statement = ast.copy_location(ast.Match(node.subject, cases), node)
        code = compile(ast.Module([statement], []), self.file, "exec")
        is_alone = isinstance(node, ast.If) and len(modules) == 1
        item = modules[0] if is_alone else Union(tuple(modules), at=self._spot(node))
        return [item], [_Choice(code, branches)]


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the values in a function's closure, except for those not assigned yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not there yet
            continue
    return found


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
