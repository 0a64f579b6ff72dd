"""Help that leaves nothing out, completion in a shell, and mistakes that are told before anything
is loaded.
"""

import ast
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import typer.main
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ragfuse.cli.main import app
from tests.tiny import ROOT


def walk(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, (*path, name))
        elif path[:1] != ("bench",):
            yield (*path, name), command


COMMANDS = dict(walk(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_h_is_help_on_every_command(path):
    short, long = (CliRunner().invoke(app, [*path, flag]) for flag in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout != ""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_with_a_value_shows_its_default(path):
    silent = [
        param.name
        for param in COMMANDS[path].params
        if not param.required
        and not getattr(param, "is_flag", False)
        and not isinstance(param.show_default, str)
        and param.default in (None, "", (), [])
    ]
    assert silent == []


LATE = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            print("a model is being loaded")
            raise SystemExit(9)
sys.meta_path.insert(0, Refusing())
from ragfuse.cli import app
app()
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ask Who? --pml /nowhere/at.all", "PMLError: /nowhere/at.all: found no readable file"),
        ("ask Who? --docs /nowhere", "InputError: Wanted a file or folder, found nothing"),
        ("ask Who? --index absent", "InputError: The index 'absent' is empty."),
        ("chat --docs /nowhere", "InputError: Wanted a file or folder, found nothing"),
        ("ingest /nowhere", "InputError: Wanted a file or folder, found nothing"),
        ("schema add /nowhere/at.all", "PMLError: /nowhere/at.all: found no readable file"),
        ("calibrate --docs . --plot /nowhere/x.png", "InputError: Wanted a file to write to"),
        ("calibrate --docs /nowhere", "InputError: Wanted a file or folder, found nothing"),
        ("adapt --docs /nowhere", "InputError: Wanted a file or folder, found nothing"),
        (
            "ask Who? --server nowhere",
            "SettingsError: base_url is 'nowhere'; wanted the address of a server",
        ),
    ],
)
def test_what_is_not_there_is_told_before_a_model_is_loaded(command, said, tmp_path):
    head = json.dumps({"embedder": "minilm-l6", "chunks": [["1", "a", "/a.txt"]]}).encode()
    (tmp_path / "indexes").mkdir()
    empty = {"index": np.zeros(0, np.uint8), "chunks": np.frombuffer(head, np.uint8)}
    save_file(empty, tmp_path / "indexes" / "default.safetensors")
    kept = {**os.environ, "PYTHONPATH": str(ROOT), "RAGFUSE_HOME": str(tmp_path), "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, "-c", LATE, *shlex.split(command)],
        env=kept,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stderr.startswith(said), run.stdout + run.stderr
    assert (run.returncode, run.stdout) == (1, "")


def test_a_schema_that_is_not_registered_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    for name, value in (("HOME", tmp_path), ("MODEL", tmp_path)):  # a folder that is no model
        monkeypatch.setenv(f"RAGFUSE_{name}", str(value))
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["schema", "show", "absent"])
    assert "absent" in result.stderr, result.stderr
    assert "ModelError" not in result.stderr


def completed(shell, words, tmp_path):
    """What a shell would offer for a line that ends here."""
    kept = {**os.environ, "PYTHONPATH": str(ROOT), "RAGFUSE_HOME": str(tmp_path)}
    line = " ".join(words)
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
    }
    kept |= {"_RAGFUSE_COMPLETE": f"complete_{shell}", **asked[shell]}
    code = "import sys; sys.argv = ['ragfuse']; from ragfuse.cli import app; app()"
    run = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True)
    assert run.stderr == ""
    return run.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(shell, tmp_path):
    assert "chat" in completed(shell, ["ragfuse", "ch"], tmp_path)
    assert "--session" in completed(shell, ["ragfuse", "ask", "--se"], tmp_path)
    assert "--server" in completed(shell, ["ragfuse", "ask", "--se"], tmp_path)


def test_bash_completes_by_the_script_that_is_shown(tmp_path):
    """The script as bash runs it: its function is called as the Tab key calls it."""
    program = tmp_path / "ragfuse"
    code = (
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'ragfuse'\nfrom ragfuse.cli import"
        " app\napp()\n"
    )
    program.write_text(code)
    program.chmod(0o755)
    kept = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    tab = """
eval "$(ragfuse --show-completion)"
complete -p ragfuse
COMP_WORDS=(ragfuse sess); COMP_CWORD=1
_ragfuse_completion ragfuse
echo "${COMPREPLY[@]}"
"""
    run = subprocess.run(
        ["bash", "-c", tab], env=kept, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.stdout.split() == [
        "complete",
        "-o",
        "default",
        "-F",
        "_ragfuse_completion",
        "ragfuse",
        "sessions",
    ]


def test_the_file_of_a_model_in_gguf_is_a_model(tmp_path, monkeypatch):
    file = Path("nothing.gguf")
    monkeypatch.chdir(tmp_path)
    file.write_bytes(b"GGUF and nothing else")
    result = CliRunner().invoke(app, ["verify", str(file)], env={"RAGFUSE_HOME": str(tmp_path)})
    assert result.exit_code == 1
    assert "nothing.gguf" in result.stderr
    assert result.stderr.startswith("ModelError: ")


def test_an_option_that_says_the_same_in_several_commands_is_declared_once() -> None:
    declared = Counter[tuple[str, ...]]()
    for file in (ROOT / "ragfuse/cli").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("option", "typer.Option"):
                given = (
                    *node.args[:2],
                    *(each.value for each in node.keywords if each.arg == "help"),
                )
                declared[tuple(ast.unparse(each) for each in given)] += 1
    assert [names for names, count in declared.items() if count > 1] == []
