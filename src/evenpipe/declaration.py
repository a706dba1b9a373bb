"""Declarations of what users may write: a dataclass with a type and a docstring for every field.

    @declare("training")
    class TrainingConfig(Declared):
        \"\"\"Length of the run.\"\"\"

        steps: PositiveInt | None = None
        \"\"\"Optimizer steps.\"\"\"

Everything else follows from the declaration: values are converted and checked by pydantic, an `InputError` names the
field, its value and what is accepted (`training.steps is 0; it must be an integer of at least 1 or none`), and the help
texts, the reference page and the JSON schema for editors list the same types, defaults and docstrings.

Values may be written as in TOML and JSON: a list for a tuple, an item for a list of one item and vice versa, and "none"
for None, which TOML does not have.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError, with_config
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ArgsKwargs, core_schema
from typing_extensions import is_typeddict

from evenpipe.errors import InputError
from evenpipe.given import is_text
from evenpipe.words import nearest, refused, show, unknown

LARGEST = 1e100
"""Numbers that users write are smaller, so their sums and products stay far from the limits of floating point."""

NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]

JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"

Item = TypeVar("Item")
ListOf = Annotated[tuple[Item, ...], Strict(False)]
"""A tuple that may also be written as a list inside tables and lists."""
NonEmptyList = Annotated[tuple[Item, ...], Strict(False), MinLen(1)]

Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True, slots=True)
class Instance:
    """Marks a type whose values pydantic checks for `kinds`, if there are any, but not for their content."""

    words: str
    kinds: tuple[type, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(self.kinds) if self.kinds else core_schema.any_schema()


@dataclass(frozen=True, slots=True)
class Names:
    """Marks text that must be one of `names`, such as keys of tables: `Annotated[str, Names(("p2p", "reduce"))]`."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.names))


@dataclass(frozen=True, slots=True)
class AsTable:
    """Marks a declaration inside another one that may be written as a table."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        def build(value: Any) -> Any:
            if not isinstance(value, Mapping):
                return value
            instance = object.__new__(source)
            source.__pydantic_validator__.validate_python(ArgsKwargs((), dict(value)), self_instance=instance)
            return instance

        return core_schema.no_info_before_validator_function(build, handler(source))


Table = Annotated[Item, AsTable()]


@dataclass(frozen=True, slots=True)
class Accepts:
    """Marks a type with its own description of accepted values, and a function that first converts them.

    `read` is called with the value and its name, and raises InputError.
    """

    words: str
    read: Callable[[Any, str], Any] | None = None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def declare(path: str = "", *, unwrap_single: bool = True) -> Callable[[Kind], Kind]:
    """Make a frozen, keyword-only dataclass whose values are checked. Building one raises InputError for a value that
    is not accepted, and TypeError for an unknown name.

    path: precedes the names of the fields in messages. unwrap_single: whether a list of one item counts as that item if
    the field also takes single values.
    """

    def decorate(kind: Kind) -> Kind:
        checked = checked_dataclass(frozen=True, kw_only=True, slots=True, config=_CONFIG)(kind)
        build = checked.__init__
        setattr(checked, "unwrap_single", unwrap_single)  # noqa: B010
        setattr(checked, "declared_path", path)  # noqa: B010 pydantic's type does not know it

        def build_checked(self: Any, **values: Any) -> None:
            readers = _readers(checked)
            values = {name: readers[name](value) if name in readers else value for name, value in values.items()}
            try:
                build(self, **values)
            except ValidationError as error:
                raise _refusal(checked, values, error) from None

        setattr(checked, "__init__", functools.wraps(build)(build_checked))  # noqa: B010
        return typing.cast(Kind, checked)

    return decorate


_CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


def from_table(kind: type[Item], values: Any) -> Item:
    """A declaration from a table of TOML or JSON. Raises InputError for an unknown, missing or wrong field."""
    path, known = kind.declared_path, field_types(kind)  # type: ignore
    if not isinstance(values, Mapping):
        raise refused(path, values, f"a table of {', '.join(known)}")
    for key in values:
        if key not in known:
            raise unknown_key(path, str(key), known)
    return kind(**values)


strict_table = with_config(_CONFIG | {"extra": "ignore"})
"""Decorates a TypedDict of a file for `check_table`: unknown keys are ignored."""


def check_table(kind: Any, values: Any) -> Any:
    """`values` as the TypedDict. Raises InputError for a missing or wrong field."""
    if not isinstance(values, Mapping):
        raise InputError(f"{show(values)} is not a table of {', '.join(field_types(kind))}")
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise _refusal(kind, values, error) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Declared:
    """Base of declarations that check more than single values, in `check`."""

    __slots__ = ()
    declared_path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that are valid alone, but not in combination."""

    def require(self, name: str, holds: bool, accepted: str) -> None:
        """Unless the condition holds, raise an InputError that says what the field `name` must be."""
        if not holds:
            raise refused(_where(self.declared_path, name), getattr(self, name), accepted)

    def known(self, name: str, names: Iterable[str]) -> None:
        """Require the named field to be in `names`; the error proposes the nearest."""
        if (value := getattr(self, name)) not in names:
            raise unknown(_where(self.declared_path, name), value, names)


# --- sentences --------------------------------------------------------------------------------------------------------


def _refusal(kind: type, values: Mapping[str, Any], error: ValidationError) -> Exception:
    """The error about the innermost refused value of the first field that pydantic refuses.

    For a union, pydantic lists an error for each type.
    """
    errors = error.errors(include_url=False)
    path: str = getattr(kind, "declared_path", "")
    name = errors[0]["loc"][0] if errors[0]["loc"] else ""
    if errors[0]["type"] == "unexpected_keyword_argument" and len(errors[0]["loc"]) == 1:
        return TypeError(f"unknown argument '{name}'{nearest(str(name), field_types(kind))}")
    for details in errors:
        if isinstance(cause := details.get("ctx", {}).get("error"), InputError):
            return cause
    refusals = [
        _refusal_at(path, kind, values, details["loc"])
        for details in errors
        if details["loc"] and details["loc"][0] == name
    ]
    return max(refusals, key=lambda refusal: refusal[0])[1]


def _refusal_at(where: str, annotation: Any, value: Any, loc: tuple[int | str, ...]) -> tuple[int, InputError]:
    """The depth of an error of pydantic in a value, and our error about it."""
    depth = 0
    for key in loc:  # an index, a key or a field, or the name of a type of a union
        of_fields, keys, of_values, items = _inner_types(annotation)
        if isinstance(value, Mapping) and isinstance(key, str):
            if key in value:
                if key not in of_fields and (of_fields or (keys and key not in keys)):
                    return depth + 1, unknown_key(where, key, of_fields or keys)
                where, annotation = _where(where, key), of_fields.get(key, of_values)
            elif key in of_fields:
                accepted = article(words(of_fields[key]))
                return depth + 1, InputError(f"{_where(where, key)} is missing; it must be {accepted}")
            else:
                continue
        elif isinstance(value, (list, tuple)) and items and isinstance(key, int) and key < len(value):
            where, annotation = f"{where}[{key}]", items[0] if items[-1] is ... else items[key]
        else:
            continue
        value, depth = value[key], depth + 1
    return depth, _not_accepted(where, value, annotation)


def _inner_types(annotation: Any) -> tuple[dict[str, Any], tuple[str, ...], Any, tuple[Any, ...]]:
    """Types inside a type: of the fields of a table; its known keys, and the type of its values; of items of a list."""
    of_fields: dict[str, Any] = {}
    keys: tuple[str, ...] = ()
    of_values: Any = None
    items: tuple[Any, ...] = ()
    for member in union_members(optional(annotation)[0]):
        kind = _bare(member)[0]
        if get_origin(kind) in (dict, Mapping):
            key, of_values = get_args(kind)
            keys = _names(*_bare(key))
        elif get_origin(kind) in (tuple, list):
            items = get_args(kind) if get_origin(kind) is tuple else (*get_args(kind), ...)
        elif hasattr(kind, "declared_path") or is_typeddict(kind):
            of_fields = field_types(kind)
    return of_fields, keys, of_values, items


def unknown_key(where: str, key: str, known: Iterable[str]) -> InputError:
    """The error about an unknown key of a table."""
    names = [str(name) for name in known]
    return InputError(f"{where} has no field {show(key)}; known: {', '.join(names)}{nearest(key, names)}")


def _not_accepted(where: str, value: Any, annotation: Any) -> InputError:
    kind, marks = _bare(optional(annotation)[0])
    if isinstance(value, str) and (names := _names(kind, marks)):
        return unknown(where, value, names)
    of_fields, keys, _, _ = _inner_types(kind)
    if known := keys or (of_fields if AsTable() in marks else ()):
        return refused(where, value, f"a table of {', '.join(known)}")
    return refused(where, value, article(words(annotation)))


def _where(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def article(text: str) -> str:
    """`text` with its article: "an integer", but "true or false"."""
    if text.startswith(("text", "true", '"')) or text[0].isdigit():
        return text
    return f"{'an' if text[0] in 'aeiouO' else 'a'} {text}"


# --- types ------------------------------------------------------------------------------------------------------------


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The type of every field, with its limits, by name in the order of the source."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = hints if is_typeddict(kind) else [entry.name for entry in fields(kind)]
    return {name: hints[name] for name in names}


def optional(annotation: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is accepted."""
    types_left = [member for member in union_members(annotation) if member is not type(None)]
    if len(types_left) == len(union_members(annotation)):
        return annotation, False
    return (types_left[0] if len(types_left) == 1 else Union[tuple(types_left)]), True  # noqa: UP007


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternative types of a field."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def takes_text(annotation: Any) -> bool:
    """Whether every value of this type is text."""
    annotation, _ = optional(annotation)
    kinds = [_bare(member)[0] for member in union_members(annotation)]
    return all(kind is str or get_origin(kind) is Literal for kind in kinds)


def words(annotation: Any) -> str:
    """A field's type in words, with its limits."""
    annotation, is_optional = optional(annotation)
    members = union_members(annotation)
    lists = [
        member
        for member in members
        if get_origin(_bare(member)[0]) is tuple and get_args(_bare(member)[0])[0] in members
    ]
    choices = [text for member in members if member not in lists for text in _choices(*_bare(member))]
    choices += ["a list of them"] if lists else []
    choices += ["none"] if is_optional else []
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _choices(kind: Any, marks: tuple[Any, ...]) -> list[str]:
    """The values of a literal or of names, or any other type in words."""
    return [show(value) for value in _names(kind, marks)] or [_type_words(kind, marks)]


def _names(kind: Any, marks: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a literal or of `Names`."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(name for mark in marks if isinstance(mark, Names) for name in mark.names)


def _type_words(kind: Any, marks: tuple[Any, ...]) -> str:
    for mark in marks:
        if isinstance(mark, (Accepts, Instance)):
            return mark.words
    origin = get_origin(kind)
    if origin in (tuple, list):
        item, *further_items = get_args(kind) if origin is tuple else (*get_args(kind), ...)
        non_empty = "non-empty " if any(isinstance(mark, MinLen) for mark in marks) else ""
        if len({item, *further_items} - {...}) > 1:
            return f"list of {', '.join(map(words, (item, *further_items)))}"
        if len(union_members(item)) > 1:
            return f"{non_empty}list, each {article(words(item))}"
        first, space, limits = words(item).partition(" ")
        plural = first if first == "text" or first.startswith('"') else f"{first}s"
        list_words = f"list of {plural}" if further_items == [...] else f"list of {1 + len(further_items)} {plural}"
        return f"{non_empty}{list_words}{space}{limits}"
    if origin in (dict, Mapping) or is_typeddict(kind):
        return "table"
    name = _NAMES.get(kind) or kind.__name__
    bounds = {bound: getattr(mark, _LIMITS[bound][0]) for mark in marks if (bound := type(mark)) in _LIMITS}
    if set(bounds) == {Ge, Le}:
        return f"{name} from {bounds[Ge]} to {bounds[Le]}"
    limits = " and ".join(f"{_LIMITS[bound][1]} {limit:g}" for bound, limit in bounds.items())
    return f"{name} {limits}".replace("and of", "and").strip()


_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
_LIMITS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "of at least"),
    Gt: ("gt", "above"),
    Le: ("le", "of at most"),
    Lt: ("lt", "below"),
}


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and the annotations."""
    if get_origin(annotation) is typing.NotRequired:
        (annotation,) = get_args(annotation)
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, tuple(marks)
    return annotation, ()


class _Reader:
    """Converts a value of TOML or JSON for a field, and refuses values that no field accepts."""

    def __init__(self, where: str, annotation: Any, *, unwrap_single: bool) -> None:
        kind, self.is_optional = optional(annotation)
        self.where = where
        members = [_bare(member) for member in union_members(kind)]
        self.marks = [mark for _, marks in members for mark in marks if isinstance(mark, Accepts) and mark.read]
        lists = [get_args(member) for member, _ in members if get_origin(member) is tuple]
        self.takes_lists, self.unwraps_single = bool(lists), unwrap_single and len(members) > 1
        self.item = lists[0][0] if lists and len(members) == 1 and lists[0][-1] is ... else None

    def __call__(self, value: Any) -> Any:
        if self.is_optional and value == "none":
            return None
        if isinstance(value, (int, float, str, list, tuple)):
            self._check(value)
        for mark in self.marks:
            value = value if mark.read is None else mark.read(value, self.where)
        if not self.takes_lists:
            return value
        if isinstance(value, list):
            value = tuple(value)
        if self.item is not None and _is_item(value, self.item):
            return (value,)
        return value[0] if self.unwraps_single and isinstance(value, tuple) and len(value) == 1 else value

    def _check(self, value: Any) -> None:
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(entry, str) and not is_text(entry):
                raise refused(self.where, value, "text, without NUL and halves of surrogate pairs")
            if isinstance(entry, (int, float)) and not abs(entry) < LARGEST:
                raise refused(self.where, value, f"a finite number below {LARGEST:g}")


@functools.cache
def _readers(kind: type) -> dict[str, _Reader]:
    return {
        name: _Reader(_where(kind.declared_path, name), annotation, unwrap_single=kind.unwrap_single)  # type: ignore
        for name, annotation in field_types(kind).items()
    }


def _is_item(value: Any, annotation: Any) -> bool:
    kind = _bare(annotation)[0]
    if isinstance(value, str):
        return takes_text(kind)
    return type(value) is kind or (kind is float and type(value) is int)


# --- in words, and for editors ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """One field in words."""

    name: str
    type: str
    default: str
    text: str


def describe_fields(kind: type) -> list[FieldHelp]:
    """The fields of a declaration in words, in the order of the source."""
    texts, defaults = docstrings(kind), default_of(kind)
    return [
        FieldHelp(name, words(annotation), show(defaults.get(name)), texts.get(name, ""))
        for name, annotation in field_types(kind).items()
    ]


def summary(kind: type) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def default_of(kind: type) -> dict[str, Any]:
    """The default of every field that has one, by name."""
    return {entry.name: _default(entry) for entry in fields(kind) if _default(entry) is not MISSING}


def _default(entry: Field[Any]) -> Any:
    return entry.default_factory() if entry.default_factory is not MISSING else entry.default


def docstrings(kind: type) -> dict[str, str]:
    """The string below each field in the class body, in one line; if there is none, that of a base class or of a class
    in `documented_by`."""
    texts: dict[str, str] = {}
    for base in (*reversed(getattr(kind, "documented_by", ())), *reversed(kind.__mro__)):
        if base.__module__ in sys.modules and base.__name__ in _classes(base.__module__):
            texts |= _texts_of(_classes(base.__module__)[base.__name__])
    return texts


def _texts_of(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for statement, below in itertools.pairwise(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = " ".join(inspect.cleandoc(value.value).split())
    return texts


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # builtins
        return {}
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def file_schema(kind: type, title: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a file that is one table."""
    return {"$schema": JSON_SCHEMA, "title": title, **json_schema(kind)}


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema of a declaration as a table of TOML or JSON."""
    schema = _adapter(kind).json_schema()
    schema.pop("title", None)
    schema["description"] = summary(kind)
    texts = docstrings(kind)
    for name, annotation in field_types(kind).items():
        described = schema["properties"][name]
        if name in texts:
            described["description"] = texts[name]
        if not is_typeddict(kind):
            _allow_toml(described, annotation)
    if not is_typeddict(kind):
        schema["additionalProperties"] = False
    return schema


def _allow_toml(schema: dict[str, Any], annotation: Any) -> None:
    """Accept "none" for null, and an item for a list of any length, as `_Reader` does."""
    is_optional = optional(annotation)[1]
    schema.pop("title", None)
    forms = schema.pop("anyOf", None) or [{key: schema.pop(key) for key in list(schema) if key not in _ABOUT}]
    items = [form["items"] for form in forms if form.get("type") == "array" and "items" in form]
    forms += [item for item in items if item not in forms]
    if is_optional:
        forms.append({"const": "none"})
    if any(
        isinstance(mark, Accepts) and mark.read for member in union_members(annotation) for mark in _bare(member)[1]
    ):
        forms.append({"type": "string"})
    if len(forms) == 1:
        schema |= forms[0]
    else:
        schema["anyOf"] = forms


_ABOUT = ("description", "default")
