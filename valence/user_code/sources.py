"""Source files that the results of a Python function depend on."""

from __future__ import annotations

import dis
import hashlib
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

PROGRAM = ("__main__", "__mp_main__")
"""Names of the module that Python was started with."""
LIBRARIES = ("site-packages", "dist-packages")
"""Names of folders of installed packages."""


def imported_sources(names: list[str]) -> dict[str, str]:
    """Return the SHA-256 digests of the files of these modules and of all modules that they import,
    directly or through others, by module name.

    Finds ``import`` statements anywhere in a file, also inside functions, and calls of
    ``import_module`` with a literal name. Leaves out the standard library, installed packages and
    Valence. Does not see modules that are named at run time (``loaded_sources``), other files, or
    the network.
    """
    digests: dict[str, str] = {}
    pending = [part for name in names for part in _parents(name)]
    while pending:
        name = pending.pop()
        path = None if name in digests else _find(name)
        if path is None or _is_library(path):
            continue
        digests[name], targets = _read(name, path)
        pending += [part for target in targets for part in _parents(target)]
    return dict(sorted(digests.items()))


def function_sources(fn: Any, target: str) -> dict[str, Any] | None:
    """Return the digest of a function's file (``source``), and those of all files outside of
    installed libraries that it imports, directly or through others (``imports``).

    fn: the function. target: its import path. The file of a callable without one, such as a partial
    of a C function, is that of the module in the path. None if that has no file either.
    """
    inner, module = unwrap(fn), target.partition(":")[0]
    path = inspect.getsourcefile(inner) if hasattr(inner, "__code__") else None
    has_file = path is not None and Path(path).is_file()
    definer = (inner.__module__ or "") if has_file else module
    imports = imported_sources([module, definer])
    source = imports.get(definer)
    if source is None and path is not None and has_file:  # of an installed package
        source = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if source is None:
        return None
    others = {name: value for name, value in imports.items() if value != source}
    return {"source": source, **({"imports": others} if others else {})}


def code_digest(functions: Iterable[Callable[..., Any]], *facts: Any) -> str:
    """Return a digest of what users' functions compute.

    Of a module: its file, and all that it imports outside of installed libraries. Of the program or
    notebook itself: the text of the function and the values that it reads, since other parts of it
    change often. Also values that a function keeps: of its closure, its defaults and its object.
    facts: further values that the result depends on.
    """
    parts = [_code_of(fn, set()) for fn in functions]
    return hashlib.sha256(json.dumps([parts, repr(facts)], sort_keys=True).encode()).hexdigest()


def _code_of(fn: Any, known: set[int]) -> Any:
    """Describe a function, or another value that it reads, for a digest.

    known: ids of functions that are described already, which may call each other.
    """
    inner: Any = unwrap(fn) if callable(fn) else None
    code = getattr(inner, "__code__", None)
    if isinstance(fn, set | frozenset):  # whose order differs between processes
        return sorted(map(repr, cast(Iterable[object], fn)))
    if code is None:
        text = repr(fn)
        return type(fn).__name__ if " at 0x" in text else text
    if id(fn) in known:
        return None
    known.add(id(fn))
    module, name = str(inner.__module__), inner.__qualname__
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return name
    is_program = module in PROGRAM
    sources: Any = None if is_program else function_sources(fn, f"{module}:{name}")
    if sources is None:
        try:
            sources = inspect.getsource(inner)
        except (OSError, TypeError):  # not in a file
            sources = repr((code.co_code, code.co_consts))
    values = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)]
    values += [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
    if is_program:
        values += [inner.__globals__[key] for key in code.co_names if key in inner.__globals__]
    if isinstance(fn, partial):
        values += [fn.args, fn.keywords]
    elif not isinstance(fn, FunctionType):
        values += [vars(fn) if hasattr(fn, "__dict__") else None]
    return [name, sources, [_code_of(value, known) for value in values]]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable has no value yet
        return False


def unwrap(fn: Callable[..., Any]) -> Any:
    """The function inside wrappers, partials and callable objects."""
    inner: Any = inspect.unwrap(fn)
    while isinstance(inner, partial):
        inner = inspect.unwrap(inner.func)
    return inner if hasattr(inner, "__code__") else getattr(type(inner), "__call__", inner)  # noqa: B004


def loaded_sources() -> dict[str, dict[str, str]]:
    """Return path and SHA-256 digest of the files of all loaded modules outside of libraries, by
    module name, without that of the program. Some of them are named only at run time.

    Leaves out code that a library generates, as torch.compile does, whose modules are named as
    parts of the library.
    """
    sources: dict[str, dict[str, str]] = {}
    for name in list(sys.modules):
        path, package = _loaded_file(name), _loaded_file(name.partition(".")[0])
        is_library = any(file is not None and _is_library(file) for file in (path, package))
        if path is not None and not is_library and name not in PROGRAM and path.is_file():
            sources[name] = {"path": str(path), "digest": _read(name, path)[0]}
    return sources


def _loaded_file(name: str) -> Path | None:
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return Path(file).absolute() if isinstance(file, str) else None


def are_current(sources: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether these modules still have the digests that ``loaded_sources`` returned."""
    try:
        return all(_read(name, Path(s["path"]))[0] == s["digest"] for name, s in sources.items())
    except OSError:
        return False


_first_reads: WeakKeyDictionary[ModuleType, tuple[str, list[str]]] = WeakKeyDictionary()
"""Digest and imports of loaded modules, when they were first read: a file may change later, while
its code stays the same until the module is imported again.
"""


def _read(name: str, path: Path) -> tuple[str, list[str]]:
    """Return the digest of a module's file, and the names that it may import."""
    loaded = sys.modules.get(name)
    if isinstance(loaded, ModuleType) and loaded in _first_reads:
        return _first_reads[loaded]
    content = path.read_bytes()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    targets = list(_imports(content, package)) if path.suffix == ".py" else []
    result = hashlib.sha256(content).hexdigest(), targets
    if isinstance(loaded, ModuleType):
        _first_reads[loaded] = result
    return result


def _parents(name: str) -> list[str]:
    """Return a module's name and those of the packages that contain it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the absolute names that a module may import; some are attributes, not modules.

    package: the package that relative imports start from; "" for none.
    """
    # Code instead of a syntax tree, which CPython 3.11 cannot build in two threads at once.
    try:
        pending = [compile(source, "<module>", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):  # importing it raises the error
        return
    parts = package.split(".") if package else []
    while pending:
        code = pending.pop()
        pending += [value for value in code.co_consts if isinstance(value, CodeType)]
        constants: list[Any] = []
        is_called = False
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                level, names = constants[-2:]
                base = parts[: len(parts) - level + 1] if level else []
                module = ".".join([*base, *([instruction.argval] if instruction.argval else [])])
                yield from ([module] if module else [])
                yield from (f"{module}.{name}".lstrip(".") for name in names or ())
            elif instruction.argval in ("import_module", "__import__"):
                is_called = True
            elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                value = instruction.argval
                constants.append(value)
                if is_called and isinstance(value, str):
                    level = len(value) - len(value.lstrip("."))
                    base = parts[: len(parts) - level + 1] if level else []
                    yield ".".join([*base, value.lstrip(".")])
                is_called = False


def _find(name: str) -> Path | None:
    """Return the file of a module without importing it; None if it is no module, or has no file.

    A package without ``__init__.py`` has no file, but the modules in it do.
    """
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file and Path(file).is_file() else None
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    file = Path(spec.origin) if spec.has_location and spec.origin else None
    for part in rest:
        candidates = [
            path
            for folder in folders
            for path in (folder / part / "__init__.py", folder / f"{part}.py")
        ]
        file = next((path for path in candidates if path.is_file()), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if file is None and not folders:
            return None
    return file


@cache
def _is_library(path: Path) -> bool:
    """Return whether a file belongs to Python, to an installed package or to Valence."""
    path = path.resolve()
    if any(part in LIBRARIES for part in path.parts):
        return True
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    roots = [Path(__file__).parents[1], *(Path(folder) for folder in standard)]
    return any(path.is_relative_to(root.resolve()) for root in roots)
