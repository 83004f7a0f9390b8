# chz annotates most of its functions. Here are the others, with the rest of its names that we use.

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

from chz import validators as validators
from chz.blueprint import Blueprint as Blueprint
from chz.blueprint import entrypoint as entrypoint
from chz.blueprint import nested_entrypoint as nested_entrypoint
from chz.data_model import asdict as asdict
from chz.data_model import chz_fields as chz_fields
from chz.data_model import is_chz as is_chz
from chz.validators import validate as validate

_T = TypeVar("_T")
_TypeT = TypeVar("_TypeT", bound=type)
_Validator = Callable[[Any, str], None]

def field(
    *,
    default: Any = ...,
    default_factory: Callable[[], Any] = ...,
    munger: Callable[[Any, Any], Any] | None = None,
    x_type: Any = ...,
    converter: Callable[..., Any] | None = None,
    meta_factory: Any = ...,
    blueprint_unspecified: Callable[..., Any] = ...,
    blueprint_cast: Callable[[str], object] | None = None,
    validator: _Validator | list[_Validator] | None = None,
    repr: bool | Callable[[Any], str] = True,
    doc: str = "",
    metadata: dict[str, Any] | None = None,
) -> Any: ...
@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@overload
def chz(version: str = ..., typecheck: bool = ...) -> Callable[[_TypeT], _TypeT]: ...
@overload
def chz(cls: _TypeT, /) -> _TypeT: ...
def replace(obj: _T, /, **changes: Any) -> _T: ...
def beta_to_blueprint_values(obj: object, skip_defaults: bool = False) -> dict[str, Any]: ...
