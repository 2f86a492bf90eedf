"""Front ends: each turns a model of one framework into a step program. Each is a leaf."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import three_parts


def extract(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace one step of a model with the front end that knows its kind.

    A ``brainstate`` module is called with ``args``; any other callable is a plain function
    ``step(params, state, x) -> (state, out)``.
    """
    brainstate = sys.modules.get('brainstate')
    if brainstate is not None and isinstance(model, brainstate.nn.Module):
        from .brainstate import extract_module_info

        return extract_module_info(model, *args, **kwargs)
    if not callable(model) or isinstance(model, type) or len(args) < 2:
        raise TypeError(
            three_parts(
                f'a model of type {type(model).__name__} with {len(args)} example(s) of its arguments',
                'a model is a brainstate module, or a function step(params, state, *inputs) -> (state, out)',
                'an instance of brainstate.nn.Module and its inputs, or such a function with params, state and inputs',
            )
        )
    from .functions import extract_function_info

    return extract_function_info(model, *args, **kwargs)
