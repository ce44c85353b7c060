"""The house rules, as tests. Each rule is a function from source text to complaints, and has a negative control."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[1]
FILE_LINES = 400
FUNCTION_LINES = 70
PARAMETERS = 6
BROAD = {"Exception", "BaseException"}

BROAD_EXCEPT_ALLOWED = {
    "pdkv/http/front.py": "interceptor: a bug ends one request with a status, never the server",
    "pdkv/http/tokenizer.py": "tokenizers raises bare exceptions for a file that it can't use",
    "pdkv/rpc/interceptors.py": "interceptor: a bug ends one call with a status, never the server",
    "pdkv/transfer/engine.py": "root of the transfer thread: its end is told to everybody who waits for a read",
}
"""Path to the reason: the root of a thread or task, or an interceptor. A handler that ends in `raise` needs none."""

LONG_FILES_ALLOWED = {
    "pdkv/cli/bench/raw.py": "the raw baselines are one script that imports nothing of pdkv: it is read alone",
}

SKIPS_IN = "tests/gpu/conftest.py"
"""The only place that may skip: tests that bear the `gpu` marker, which only those in its folder do, where there is no
device."""

POLLS_IN = "tests/waiting.py"
"""The only place among the tests that may wait for a short time between two looks, and it has a deadline."""

WITHOUT_A_TEST_OF_ITS_OWN = {
    "pdkv/ids.py": "types; every test of the pool and the tree goes through them",
    "pdkv/errors.py": "a catalogue; each error is tested where it is raised",
    "pdkv/node/messages.py": "plain values; tests/rpc converts each there and back",
    "pdkv/node/ports.py": "protocols without code",
    "pdkv/node/ranks.py": "plain values and a protocol; tests/rpc converts each there and back",
    "pdkv/node/routing.py": "plain values; tests/rpc converts each there and back",
    "pdkv/node/settings.py": "plain values of a decode node's tests",
    "pdkv/cli/bench/pulls.py": "plain values of the tests of sources and sinks",
    "pdkv/adapters/vllm/connector.py": "runs in vLLM only, which make vllm-e2e does; all that it calls is tested here",
    "pdkv/transfer/orders.py": "plain values of the engine's tests",
    "pdkv/kvcache/scramble_kernel.py": "runs on a GPU only, which tests/gpu do; what checks it there is tested here",
    "pdkv/transfer/backends/base.py": "a protocol without code",
}

MANY_PARAMETERS_ALLOWED = {"pool_map": "seven plain facts of one pool; a class for them would be the PoolMap it makes"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str], list[str]]


def _sources(folder: str) -> list[Path]:
    generated = ROOT / "pdkv" / "v1"
    return sorted(p for p in (ROOT / folder).rglob("*.py") if generated not in p.parents)


def _functions(source: str) -> Iterator[Function]:
    return (n for n in ast.walk(ast.parse(source)) if isinstance(n, Function))


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_command(function: Function) -> bool:
    """A typer command's parameters are its command line: nobody calls it by position."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    made = [{_dotted(n.func) for n in ast.walk(p) if isinstance(n, ast.Call)} for p in parameters]
    return bool(made) and all(calls & {"typer.Option", "typer.Argument"} for calls in made)


def _is_bool(annotation: ast.expr | None) -> bool:
    """`bool`, a union with it, or either within `Annotated` or `Optional`; a dict of bools is no boolean."""
    if isinstance(annotation, ast.BinOp):
        return _is_bool(annotation.left) or _is_bool(annotation.right)
    if isinstance(annotation, ast.Subscript) and _dotted(annotation.value) in ("Annotated", "Optional"):
        inner = annotation.slice
        return _is_bool(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
    return annotation is not None and _dotted(annotation) == "bool"


# --- rules over one source ------------------------------------------------------------------------------------------


def long_file(source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{lines} lines, at most {FILE_LINES}"] if lines > FILE_LINES else []


def no_docstring(source: str) -> list[str]:
    """An empty `__init__.py` says nothing and needs to say nothing."""
    return ["no module docstring"] if source.strip() and not ast.get_docstring(ast.parse(source)) else []


def long_function(source: str) -> list[str]:
    lengths = ((f, (f.end_lineno or f.lineno) - f.lineno + 1) for f in _functions(source))
    return [f"{f.lineno} {f.name}: {n} lines, at most {FUNCTION_LINES}" for f, n in lengths if n > FUNCTION_LINES]


def many_parameters(source: str) -> list[str]:
    found = []
    for f in _functions(source):
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > PARAMETERS and f.name not in MANY_PARAMETERS_ALLOWED and not _is_command(f):
            found.append(f"{f.lineno} {f.name}: {count} parameters, at most {PARAMETERS}")
    return found


def boolean_positional(source: str) -> list[str]:
    found = []
    for f in _functions(source):
        parameters = [*f.args.posonlyargs, *f.args.args]
        defaults = [None] * (len(parameters) - len(f.args.defaults)) + list(f.args.defaults)
        for p, default in zip(parameters, defaults, strict=True):
            valued = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            if (_is_bool(p.annotation) or valued) and not _is_command(f):
                found.append(f"{p.lineno} {f.name}: {p.arg} is a boolean, make it keyword-only")
    return found


def broad_except(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(c is None or _dotted(c).rpartition(".")[2] in BROAD for c in caught)
            last = node.body[-1]
            if broad and not (isinstance(last, ast.Raise) and last.exc is None):
                found.append(f"{node.lineno}: catches everything and goes on")
    return found


def timed_sleep(source: str) -> list[str]:
    """`asyncio.sleep(0)` only lets others run: no time is waited for."""
    tree = ast.parse(source)
    named = {
        alias.asname or alias.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module in ("time", "asyncio")
        for alias in n.names
        if alias.name == "sleep"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) in {"time.sleep", "asyncio.sleep", *named}:
            zero = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not zero:
                found.append(f"{node.lineno}: waits for a time; wait for the thing, with a deadline")
    return found


def unfinished(source: str) -> list[str]:
    """Notes to come back to, code that isn't there, tests that don't run."""
    banned = re.compile(r"NotImplementedError|(pytest\.(mark\.)?|unittest\.|self\.)(skip\w*|xfail|importorskip)")
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX)\b", token.string):
            found.append(f"{token.start[0]}: {token.string}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute) and banned.fullmatch(_dotted(node)):
            found.append(f"{node.lineno}: {_dotted(node)}")
    return found


def marks_gpu(source: str) -> list[str]:
    """Where a file's tests, or one of them, are said to need a GPU."""
    found = ast.walk(ast.parse(source))
    return [f"{n.lineno}" for n in found if isinstance(n, ast.Attribute) and _dotted(n) == "pytest.mark.gpu"]


def silent_skip(source: str) -> list[str]:
    """A skip that doesn't say why."""
    calls = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    skips = (n for n in calls if _dotted(n.func).startswith(("pytest.skip", "pytest.mark.skip")))
    return [f"{n.lineno}: no reason" for n in skips if not any(k.arg == "reason" for k in n.keywords)]


def machine_path(source: str) -> list[str]:
    """Nothing names a folder of the machine that it was written on."""
    pattern = re.compile(r"/wor" + r"k/|(?<![\w\"'-])shar" + r"ed/")
    return [f"{i}: {line.strip()}" for i, line in enumerate(source.splitlines(), 1) if pattern.search(line)]


def without_test(sources: Iterable[str], tests: Iterable[str]) -> list[str]:
    """pdkv/a/b.py needs tests/a/test_b.py; packages and entry points (`__init__`, `__main__`) don't."""
    present, missing = set(tests), []
    for source in map(Path, sources):
        wanted = Path("tests", *source.parts[1:-1], f"test_{source.name}").as_posix()
        if not source.name.startswith("__") and wanted not in present:
            missing.append(f"{source.as_posix()}: no {wanted}")
    return missing


# --- the rules hold -------------------------------------------------------------------------------------------------


def _complaints(rule: Rule, paths: Iterable[Path]) -> list[str]:
    return [f"{p.relative_to(ROOT)}:{c}" for p in paths for c in rule(p.read_text("utf-8"))]


@pytest.mark.parametrize("rule", [no_docstring, long_function, many_parameters, boolean_positional, unfinished])
def test_package(rule: Rule) -> None:
    assert _complaints(rule, _sources("pdkv")) == []


def test_long_files_only_where_allowed() -> None:
    paths = [p for p in _sources("pdkv") if p.relative_to(ROOT).as_posix() not in LONG_FILES_ALLOWED]
    assert _complaints(long_file, paths) == []
    for path in LONG_FILES_ALLOWED:
        assert long_file((ROOT / path).read_text("utf-8")), f"{path} needs no allowance any more"


@pytest.mark.parametrize("rule", [long_file, timed_sleep, unfinished])
def test_tests(rule: Rule) -> None:
    where = ROOT / {unfinished: SKIPS_IN, timed_sleep: POLLS_IN}.get(rule, "nowhere")
    assert _complaints(rule, [path for path in _sources("tests") if path != where]) == []


def test_only_tests_of_a_gpu_are_skipped_and_they_say_why() -> None:
    """Each of them bears the marker, nobody else does, and what skips gives a reason, which `-rs` shows."""
    where = ROOT / SKIPS_IN
    assert unfinished(where.read_text("utf-8")), f"{SKIPS_IN} needs no allowance any more"
    assert silent_skip(where.read_text("utf-8")) == []
    bearing = [p for p in _sources("tests") if marks_gpu(p.read_text("utf-8"))]
    assert bearing == sorted(where.parent.glob("test_*.py"))
    assert " -rs " in (ROOT / "pyproject.toml").read_text("utf-8")


def test_broad_except_only_where_allowed() -> None:
    paths = [p for p in _sources("pdkv") if p.relative_to(ROOT).as_posix() not in BROAD_EXCEPT_ALLOWED]
    assert _complaints(broad_except, paths) == []
    for path in BROAD_EXCEPT_ALLOWED:
        assert broad_except((ROOT / path).read_text("utf-8")), f"{path} needs no allowance any more"


def test_no_machine_paths() -> None:
    folders = ("pdkv", "tests", "tools", "proto", "docs", "deploy", "benchmarks", ".ci")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files += [p for p in ROOT.iterdir() if p.is_file() and p.suffix in ("", ".md", ".toml", ".yaml", ".yml")]
    texts = [p for p in files if p.suffix not in (".pyc", ".png", ".gz", ".xz") and not p.name.startswith(".git")]
    assert _complaints(machine_path, texts) == []


def test_tests_mirror_the_source() -> None:
    sources = [p.relative_to(ROOT).as_posix() for p in _sources("pdkv")]
    tests = [p.relative_to(ROOT).as_posix() for p in _sources("tests")]
    assert without_test((s for s in sources if s not in WITHOUT_A_TEST_OF_ITS_OWN), tests) == []
    assert [s for s in WITHOUT_A_TEST_OF_ITS_OWN if s not in sources] == []


def test_imports_go_down() -> None:
    # in a process of its own: the command switches off every logger that exists
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- each rule can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (long_file, "a = 1\n" * 401, "a = 1\n" * 400),
        (no_docstring, "a = 1", '"""Guarantees nothing."""\na = 1'),
        (long_function, "def f():\n" + "    a = 1\n" * 70, "def f():\n" + "    a = 1\n" * 69),
        (many_parameters, "def f(a, b, c, d, e, *, f, g): ...", "class A:\n def f(self, a, b, c, d, e, f): ..."),
        (many_parameters, "async def f(a, b, c, d, e, f, g): ...", "async def f(a, b, c, d, e, f, *g, **h): ..."),
        (boolean_positional, "def f(a: bool): ...", "def f(*, a: bool): ..."),
        (boolean_positional, "def f(a: 'int', b: None | bool = None): ...", "def f(a: dict[str, bool]): ..."),
        (boolean_positional, "def f(a: Annotated[bool, 'on']): ...", "def f(a: int = 0): ..."),
        (boolean_positional, "def f(a=True): ...", "def f(a: Annotated[bool, typer.Option()] = True): ..."),
        (broad_except, "try: ...\nexcept Exception: ...", "try: ...\nexcept OSError: ..."),
        (broad_except, "try: ...\nexcept: ...", "try: ...\nexcept BaseException:\n clean()\n raise"),
        (broad_except, "try: ...\nexcept (OSError, BaseException): ...", "try: ...\nexcept (OSError, KeyError): ..."),
        (broad_except, "try: ...\nexcept builtins.Exception as e:\n raise Other from e", "try: ...\nfinally: ..."),
        (timed_sleep, "time.sleep(0.1)", "event.wait(0.1)"),
        (timed_sleep, "async def f(): await asyncio.sleep(1)", "async def f(): await asyncio.sleep(0)"),
        (timed_sleep, "from time import sleep as nap\nnap(1)", "from mattress import sleep\nsleep(1)"),
        (unfinished, "a = 1  # TODO: b", "a = 'TODO'"),
        (unfinished, "raise NotImplementedError", "raise ValueError"),
        (unfinished, "@pytest.mark.skipif(True)\ndef f(): ...", "@pytest.mark.parametrize('a', [])\ndef f(): ..."),
        (unfinished, "pytest.importorskip('torch')", "pytest.raises(ValueError)"),
        (silent_skip, "pytest.mark.skip()", "pytest.mark.skip(reason='no device')"),
        (silent_skip, "pytest.skip(allow_module_level=True)", "pytest.fail('no')"),
        (marks_gpu, "pytestmark = pytest.mark.gpu", "pytestmark = pytest.mark.slow"),
        (marks_gpu, "@pytest.mark.gpu\ndef test(): ...", "def test(gpu): ..."),
        (machine_path, "a = '/wor" + "k/b'", "a = '/workers/b'"),
        (machine_path, "see ../shar" + "ed/design", "full or shared"),
    ],
)
def test_a_rule_complains_about_the_bad_and_not_about_the_good(rule: Rule, bad: str, good: str) -> None:
    assert rule(bad)
    assert not rule(good)


def test_broad_except_that_raises_another_error_is_broad() -> None:
    with_cause = "try: ...\nexcept Exception as e:\n raise ValueError from e"
    assert broad_except(with_cause.replace("raise ValueError from e", "pass"))
    assert broad_except(with_cause)


def test_a_missing_mirror_is_found() -> None:
    sources = ["pdkv/kvcache/pool.py", "pdkv/kvcache/__init__.py", "pdkv/config.py"]
    assert without_test(sources, ["tests/kvcache/test_pool.py", "tests/test_config.py"]) == []
    assert without_test(sources, ["tests/test_pool.py"]) == [
        "pdkv/kvcache/pool.py: no tests/kvcache/test_pool.py",
        "pdkv/config.py: no tests/test_config.py",
    ]


def test_an_upward_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "upside"
    package.mkdir()
    for name, text in {"__init__": "", "low": "from upside import high", "high": ""}.items():
        (package / f"{name}.py").write_text(text, "utf-8")
    config = tmp_path / "contracts.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "upside"\n[[tool.importlinter.contracts]]\nname = "down"\n'
        'type = "layers"\nlayers = ["upside.high", "upside.low"]\n',
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    configure()
    assert not lint_imports(config_filename=str(config), cache_dir=None)
    (package / "low.py").write_text("", "utf-8")
    assert lint_imports(config_filename=str(config), cache_dir=None)
