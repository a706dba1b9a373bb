"""Python objects that a configuration names as "module:name": your optimizer, your callbacks."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.words import nearest, show


def check_name(field: str, name: str) -> None:
    """Raise InputError for a text that does not have the form module:name."""
    module, _, attribute = name.partition(":")
    if not all(identifier.isidentifier() for identifier in module.split(".")) or not attribute.isidentifier():
        raise InputError(f'{field} is {show(name)}; it must be written "module:name"')


def find_named(field: str, name: str) -> Any:
    """Import the object that `field` names. Modules in the folder where the command was started are also found.

    Raises InputError if there is no such module or name; with a traceback if the module cannot be imported.
    """
    check_name(field, name)
    module_name, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that a file there cannot hide an installed module
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"{field} is {show(name)}, but there is no module {error.name}, neither installed nor in {folder}"
            ) from None
        told = told_with_traceback(error, __file__)
        raise InputError(f"{field} is {show(name)}, but its module cannot be imported: {told}") from error
    target = getattr(module, attribute, None)
    if target is None:
        public_names = [public_name for public_name in vars(module) if not public_name.startswith("_")]
        raise InputError(
            f"{field} is {show(name)}, but {module_name} has no {attribute}{nearest(attribute, public_names)}"
        )
    return target


def told_with_traceback(error: Exception, ours: str) -> str:
    """Return the error in words and, below them, its traceback without the lines of our file `ours` and of imports."""
    hidden = (ours, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename not in hidden and not frame.filename.startswith("<frozen")]
    lines = "".join(traceback.format_list(theirs)).rstrip("\n")
    words = "".join(traceback.format_exception_only(error)).strip()
    return f"{words}\nTraceback (most recent call last):\n{lines}\n{words}" if theirs else words
