"""Frozen records that are saved beside weights, and checks of values that come from a file.

A recipe keeps what its model is in a frozen dataclass `ModelInfo`, and what it must know of the run
in a `RunInfo`. Both are saved as `dataclasses.asdict` makes them, and `read` makes a record of them
again:

    @dataclass(frozen=True)
    class ModelInfo:
        # The second is a schema that values must fit. A text ends the message if they do not.
        layers: Annotated[int, range(1, 129), "this recipe makes smaller models"]
        vocabulary: list[str]

    info = records.read(ModelInfo, saved.model_info, saved.path)
"""

import dataclasses
import types
import typing
from pathlib import Path

from common.errors import UsageError

MISSING = object()
PLAIN = (bool, int, float, str, type(None))  # what both kinds of files keep as it is


def read(kind: type, values: dict, source: str | Path):
    """A record of the dataclass `kind` with these values, which `asdict` made. A field that has a
    default may be missing. Raises `UsageError` with `source`, the file that they are from, and the
    first field that is missing, unknown or of another type."""
    if reason := mismatch(values, dict, kind.__name__):
        raise UsageError(f"{source}: {reason}")
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {}
    for field in dataclasses.fields(kind):
        place = f"{kind.__name__}.{field.name}"
        if field.name not in values:
            if field.default is field.default_factory is dataclasses.MISSING:
                raise UsageError(f"{source}: {place} is missing")
            continue
        known[field.name] = _convert(values[field.name], hints[field.name], place, source)
    if unknown := sorted(map(str, values.keys() - known.keys())):
        raise UsageError(f"{source}: {kind.__name__} has no field {unknown[0][:40]!r}")
    return kind(**known)


def check(record) -> None:
    """Raises `UsageError` for a record that could not be saved, or not be read again."""
    kind = type(record)
    values = dataclasses.asdict(record)
    _require_plain(values, kind.__name__)
    read(kind, values, "what is saved with the weights")


def _require_plain(value, place: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if type(key) is not str:
                raise UsageError(f"{place}: its key {str(key)[:40]!r} must be a str")
            _require_plain(each, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _require_plain(each, f"{place}[{number}]")
    elif type(value) not in PLAIN:
        raise UsageError(
            f"{place} is of type {type(value).__name__}: what is saved with the weights must be"
            " numbers (int, float), texts, lists and dictionaries; .item(), .tolist() or list() make"
            " them"
        )


def _convert(value, hint, place: str, source: str | Path):
    """`value` as `hint` says: JSON's lists become tuples, and dictionaries become records."""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *schemas = typing.get_args(hint)
        advice = "".join(f": {text}" for text in schemas if isinstance(text, str))
        for schema in schemas:
            if not isinstance(schema, str) and (reason := mismatch(value, schema, place)):
                raise UsageError(f"{source}: {reason}{advice}")
    if dataclasses.is_dataclass(hint):
        if reason := mismatch(value, dict, place):
            raise UsageError(f"{source}: {reason}")
        return read(hint, value, source)
    if isinstance(hint, types.UnionType):
        return _convert_union(value, hint, place, source)
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    allowed = {float: (float, int), tuple: (tuple, list)}.get(origin, origin)
    if origin is typing.Any:
        return value
    if reason := mismatch(value, allowed, place):
        wrong = f"of type {type(value).__name__} instead of {origin.__name__}"
        raise UsageError(f"{source}: {reason}, {wrong}")
    if origin is list and inner:
        return [_convert(each, inner[0], f"{place}[{i}]", source) for i, each in enumerate(value)]
    if origin is tuple:
        return _convert_tuple(value, inner, place, source)
    return value


def _convert_union(value, hint, place: str, source: str | Path):
    """For `A | None` and other unions: the first type that fits."""
    kinds = typing.get_args(hint)
    if value is None and types.NoneType in kinds:
        return None
    failure = None
    for kind in kinds:
        if kind is types.NoneType:
            continue
        try:
            return _convert(value, kind, place, source)
        except UsageError as error:
            failure = error
    raise failure


def _convert_tuple(value, inner: tuple, place: str, source: str | Path) -> tuple:
    if not inner:
        return tuple(value)
    kinds = inner
    if inner[-1] is Ellipsis:
        kinds = [inner[0]] * len(value)
    if len(kinds) != len(value):
        raise UsageError(f"{source}: {place} has {len(value)} values instead of {len(kinds)}")
    parts = zip(value, kinds, strict=True)
    return tuple(
        _convert(each, kind, f"{place}[{i}]", source) for i, (each, kind) in enumerate(parts)
    )


def mismatch(value, schema, place: str) -> str | None:
    """The first part of `value` that does not fit the schema, as text with its place; None if all
    of it fits. For configurations in files from elsewhere.

    A schema is a type, a range, a set of allowed values, a function that says whether a value fits,
    a tuple of schemas of which one must fit, [schema] for a list, or {key: schema} for a
    dictionary. A key that ends with "?" may be missing; other keys may be there, too."""
    if isinstance(schema, tuple):
        reasons = [mismatch(value, each, place) for each in schema]
        return reasons[-1] if all(reasons) else None
    if isinstance(schema, list) and isinstance(value, list):
        for number, each in enumerate(value):
            if reason := mismatch(each, schema[0], f"{place}[{number}]"):
                return reason
        return None
    if isinstance(schema, dict) and isinstance(value, dict):
        for key, inner in schema.items():
            name = key.removesuffix("?")
            is_left_out = name != key and name not in value
            reason = mismatch(value.get(name, MISSING), inner, f"{place}.{name}")
            if reason and not is_left_out:
                return reason
        return None
    if value is MISSING:
        return f"{place} is missing"
    return None if _fits(value, schema) else f"{place} is {str(value)[:40]!r}"


def _fits(value, schema) -> bool:
    if isinstance(schema, type):
        return isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
    if isinstance(schema, range):
        return is_within(value, schema)
    if isinstance(schema, set):
        return type(value) in (int, str) and value in schema
    if isinstance(schema, list | dict):  # and the value is something else
        return False
    try:
        return bool(schema(value))
    except Exception:  # whatever the function raises for a value of another type
        return False


def is_within(value, allowed: range) -> bool:
    """Whether a value is an integer in a range, through which `in` would walk for others."""
    return type(value) is int and value in allowed
