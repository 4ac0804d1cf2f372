"""Parameters of a notebook as a contract: typed, checked at once, unknown names refused.

The notebook's one cell tagged `parameters` repeats a model's defaults; what papermill or a person puts
in their place is read back by `read`.
"""

from __future__ import annotations

import ast
import difflib
import types
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kit.settings import SettingsError
from kit.workload import WorkloadError


class ReportError(ValueError):
    """Parameters that a report does not take, or a report that failed; the text says which."""


class Asked(BaseModel):
    """What a notebook can be asked for.

    Raises:
        ReportError: for an unknown name, a wrong type, or values that cannot be.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        known = type(self).model_fields
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.0)[0]
                raise ReportError(
                    f"no parameter {name!r}; did you mean {near!r}? There are: {', '.join(known)}"
                )
        try:
            super().__init__(**values)
            self.check(set(values))
        except ValidationError as error:
            lines = [
                f"{e['loc'][0]} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}"
                for e in error.errors()
            ]
            raise ReportError("\n".join(lines)) from None
        except (SettingsError, WorkloadError) as error:
            raise ReportError(str(error)) from None

    def check(self, given: set[str]) -> None:
        """What of the values as a whole cannot be; `given` are the names that were not left out."""


Model = TypeVar("Model", bound=Asked)


def read(namespace: Mapping[str, Any], model: type[Model]) -> Model:
    """The parameters as a notebook's globals hold them, right after its `parameters` cell.

    papermill only warns of names that the notebook does not know; here they are an error. Values
    as in that cell count as not given.

    Raises:
        ReportError: as the model does.
    """
    from IPython import get_ipython  # type: ignore[attr-defined]

    shell = get_ipython()  # type: ignore[no-untyped-call]
    hidden = set(shell.user_ns_hidden) if shell else set()
    return model(
        **{
            name: value
            for name, value in namespace.items()
            if not name.startswith("_")
            and name not in hidden
            and not isinstance(value, types.ModuleType)
            and not _is_default(model, name, value)
        }
    )


def literal(text: Any) -> Any:
    """A text as Python reads it: numbers, True, None, lists; else what it is.

    A command line gives texts: `papermill -p sizes '[1, 4]'` arrives as one.
    """
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _is_default(model: type[Asked], name: str, value: Any) -> bool:
    field = model.model_fields.get(name)
    return field is not None and type(value) is type(field.default) and value == field.default
