"""Code that all exercises share: it says what is wrong, or that nothing is.

An exercise is a file with functions to write and `check(answers)`, where `answers` is a module that has
written them: the exercise's own file, or its solution in `tutorials/solutions`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXERCISES = Path(__file__).resolve().parent
SOLUTIONS = EXERCISES.parent / "solutions"
for _place in (EXERCISES.parent, EXERCISES):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

import common  # noqa: E402, F401  (puts the project's packages on the path)


class Wrong(Exception):
    """The answer is wrong; the message says how it shows."""


def expect(condition: object, message: str) -> None:
    """Raise `Wrong(message)` unless `condition` holds."""
    if not condition:
        raise Wrong(message)


def load(path: Path) -> ModuleType:
    """An exercise or a solution: their names begin with digits and are the same in both folders."""
    name = f"{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def main(path: str) -> None:
    """Command line of an exercise or a solution: check what this very file has written."""
    own = Path(path).resolve()
    exercise = load(EXERCISES / own.name)
    try:
        exercise.check(load(own))
    except NotImplementedError:
        print(exercise.__doc__)
        print(f"Not written yet: fill in the functions in {own.name} and run this again.")
        sys.exit(2)
    except Wrong as wrong:
        print(f"Wrong: {wrong}")
        sys.exit(1)
    print("Right.")
