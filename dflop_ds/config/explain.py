"""Turns pydantic's validation errors into messages that name the place and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid word that is spelled most like ``word``, or None if none is close."""
    found = difflib.get_close_matches(word, list(valid), n=1, cutoff=cutoff)
    return found[0] if found else None


def explain(error: ValidationError, model: type[BaseModel], root: str) -> str:
    """Describe every problem of a failed validation, one per line.

    Parameters
    ----------
    error : pydantic.ValidationError
    model : type of BaseModel
        The model that was validated.
    root : str
        Name of the block, the first part of every path.
    """
    grouped: dict[str, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        entry: dict[str, Any] = dict(detail)
        path, _ = _locate(entry["loc"], model, root)
        grouped.setdefault(path, []).append(entry)
    # A wrong element of a list fails the other branches of the union too; only the element matters.
    places = [path for path in grouped if not any(other.startswith(f"{path}[") for other in grouped)]
    return "\n".join(_line(path, grouped[path], model, root) for path in places)


def _line(path: str, entries: list[dict[str, Any]], model: type[BaseModel], root: str) -> str:
    first = entries[0]
    if first["type"] == "extra_forbidden":
        return _unknown_key(path, first, model, root)
    if first["type"] == "value_error":
        return f"{path}: {first['ctx']['error']!s}."
    expected: list[str] = []
    for entry in entries:
        text = str(entry["msg"]).removeprefix("Input should be ")
        if entry["type"] == "model_type":
            text = "an object in braces"
        if text not in expected:
            expected.append(text)
    message = f"{path}: must be {' or '.join(expected)}; found {first['input']!r}."
    _, field = _locate(first["loc"], model, root)
    choices = [word for entry in entries for word in _choices(entry)]
    likely = nearest(first["input"], choices) if isinstance(first["input"], str) else None
    if likely is not None:
        return f"{message} Did you mean {likely!r}?"
    if field is not None and not field.is_required() and field.default_factory is None:
        return f"{message} Change it, or remove it for the default {field.default!r}."
    return f"{message} Change it; 'dflop-ds config schema' describes every field."


def _choices(entry: dict[str, Any]) -> list[str]:
    text = str(entry.get("ctx", {}).get("expected", "")) if entry["type"] == "literal_error" else ""
    return text.split("'")[1::2]


def _unknown_key(path: str, entry: dict[str, Any], model: type[BaseModel], root: str) -> str:
    block, key = path.rsplit(".", 1)
    owner = model
    for part in entry["loc"][:-1]:
        owner = _sub_model(owner, str(part)) or owner
    siblings = list(owner.model_fields)
    likely = nearest(key, siblings)
    if likely is not None:
        return f"{path}: unknown key; found {entry['input']!r}. Did you mean {block}.{likely}?"
    elsewhere = {place.rsplit(".", 1)[1]: place for place in _all_paths(model, root)}
    far = nearest(key, elsewhere, cutoff=0.8)
    hint = f"Did you mean {elsewhere[far]}? " if far is not None else ""
    return (
        f"{path}: unknown key; found {entry['input']!r}. {hint}Valid keys of {block}: {', '.join(siblings)}."
    )


def _locate(loc: tuple[int | str, ...], model: type[BaseModel], root: str) -> tuple[str, Any]:
    """Return the dotted path and the field of an error, without pydantic's union branches."""
    path, owner = root, model
    for position, part in enumerate(loc):
        name = str(part)
        if name not in owner.model_fields:
            unknown = position == len(loc) - 1
            return (f"{path}.{name}" if unknown else path), None
        path = f"{path}.{name}"
        inner = _sub_model(owner, name)
        if inner is None:
            indices = "".join(f"[{index}]" for index in loc[position + 1 :] if isinstance(index, int))
            return path + indices, owner.model_fields[name]
        owner = inner
    return path, None


def _sub_model(owner: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = owner.model_fields.get(name)
    annotation = None if field is None else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _all_paths(model: type[BaseModel], root: str) -> Iterator[str]:
    for name in model.model_fields:
        inner = _sub_model(model, name)
        yield f"{root}.{name}"
        if inner is not None:
            yield from _all_paths(inner, f"{root}.{name}")
