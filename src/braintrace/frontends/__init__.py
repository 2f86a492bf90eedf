"""Front ends: each turns a model of one framework into a step program. Each is a leaf."""

from __future__ import annotations

import sys
from typing import Any


def extract(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace one step of a model with the front end that knows its kind.

    A ``brainstate`` module is called with ``args``; any other callable is a plain function
    ``step(params, state, x) -> (state, out)``.
    """
    brainstate = sys.modules.get('brainstate')
    if brainstate is not None and isinstance(model, brainstate.nn.Module):
        from .brainstate import extract_module_info

        return extract_module_info(model, *args, **kwargs)
    from .functions import extract_function_info

    return extract_function_info(model, *args, **kwargs)
