"""Operations given by a function and four rules.

Here the function is enough. It is run as it is, under a mark of its name, and the
compiler finds what each weight reaches, its trace and its gradient from the equations
inside. :func:`braintrace.operations.register_primitive` takes primitives that JAX
cannot look into.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from ..errors import three_parts
from ..operations import register_primitive as register_operation
from ..ops import mark

REGISTERED: set[ETPPrimitive] = set()
"""All operations, those that were made by a user included."""
BATCHED: set[ETPPrimitive] = set()
"""Those of a batch, and those made with ``batched=True``."""
RULES: dict[str, dict[ETPPrimitive, Callable]] = {
    name: {} for name in ('dt_to_t', 'xy_to_dw', 'init_drtrl', 'init_pp')
}
"""The four rules as they were given. None of them is called."""
REGISTRIES: dict[str, Any] = {
    'ETP_PRIMITIVES': REGISTERED,
    'BATCHED_PRIMITIVES': BATCHED,
    **{f'ETP_RULES_{name.upper()}': rules for name, rules in RULES.items()},
}
"""The same by the names that tutorials import from `braintrace._op`."""


OF_MARKS = {
    'matmul': ('etp_mv', 'etp_mm'),
    'grouped_matmul': ('etp_gmv', 'etp_gmm'),
    'einsum': ('etp_einsum', 'etp_einsum'),
    'embedding': ('etp_emb_v', 'etp_emb'),
    'element_wise': ('etp_elemwise', 'etp_elemwise'),
    'conv': ('etp_conv', 'etp_conv'),
    'sparse_matmul': ('etp_sp_mv', 'etp_sp_mm'),
    'lora_matmul': ('etp_lora_mv', 'etp_lora_mm'),
}
"""Names of the marked operations, of one sample and of a batch."""


class ETPPrimitive:
    """An operation by name; ``bind`` runs its function."""

    multiple_results = False

    def __init__(self, name: str, impl_fn: Callable[..., Any] | None = None):
        self.name = name
        self.impl = impl_fn

    def def_impl(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give it its function; may be used as a decorator."""
        self.impl = function
        return function

    def def_abstract_eval(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Accepted: shapes are those of the function."""
        return function

    def bind(self, *args: Any, **params: Any) -> Any:
        """Run the operation."""
        if self.impl is None:
            raise NotImplementedError(
                three_parts(
                    f'{self.name}.bind(...) of an operation without a function',
                    'the function is what is run and what the compiler reads',
                    f'register_primitive({self.name!r}, function), or def_impl',
                )
            )
        with mark(self.name):
            return self.impl(*args, **params)

    __call__ = bind

    def _derived(self, rule: str, fn: Callable) -> Callable:
        """Not needed: derived from the function."""
        self._warn(rule)
        RULES[rule][self] = fn
        return fn

    def _warn(self, rule: str) -> None:
        warnings.warn(
            f'{rule} of {self.name} is not used: traces and gradients follow from the '
            "operation's function here",
            DeprecationWarning,
            stacklevel=4,
        )

    register_dt_to_t = partialmethod(_derived, 'dt_to_t')
    register_xy_to_dw = partialmethod(_derived, 'xy_to_dw')
    register_init_drtrl = partialmethod(_derived, 'init_drtrl')
    register_init_pp = partialmethod(_derived, 'init_pp')

    def register_etp_rules(self, **rules: Callable | None) -> None:
        """Not needed: derived from the function."""
        others = {'fast_path', 'pp_x_repr', 'snap_anchor', 'snap_adjacency'}
        known = RULES.keys() | others
        if unknown := rules.keys() - known:
            raise TypeError(
                three_parts(
                    f'register_etp_rules({", ".join(sorted(unknown))}=...)',
                    'there are no such rules',
                    f'some of {", ".join(sorted(known))}',
                )
            )
        given = {name: fn for name, fn in rules.items() if fn is not None}
        for name, fn in given.items():
            if name in RULES:
                RULES[name][self] = fn
        self._warn(', '.join(given) or 'no rule')

    def __repr__(self) -> str:
        return self.name


NAMED = {name: ETPPrimitive(name) for names in OF_MARKS.values() for name in names}
"""What stands for the marked operations in relations."""
REGISTERED.update(NAMED.values())
BATCHED.update(NAMED[names[1]] for names in OF_MARKS.values() if names[0] != names[1])


def operation_of_mark(mark: str, site: Any) -> tuple[Any, tuple[str, ...]]:
    """The operation of a site and the roles of its operands, as the published package
    calls them."""
    if mark not in OF_MARKS:
        own = (p for p in REGISTERED if p.name == mark)
        return next(own, site.primitive), ()
    one, batch = OF_MARKS[mark]
    axes = 2 if mark == 'grouped_matmul' else 1
    is_batch = site.x_var is not None and len(site.x_var.aval.shape) > axes
    operands = ('lora_b', 'lora_a') if mark == 'lora_matmul' else ('weight',)
    return NAMED[batch if is_batch else one], (*operands, 'bias')


_OWN = {
    'batched',
    'gradient_enabled',
    'trainable_invars_fn',
    'x_invar_index',
    'y_outvar_index',
}


def register_primitive(
    primitive: Any = None, operation: Any = None, **options: Any
) -> Any:
    """Declare an operation of your own to the compiler.

    ``register_primitive(primitive, operation)``: a primitive of JAX and its
    description; see :func:`braintrace.operations.register_primitive`.
    ``register_primitive(name, impl_fn, *, batched, ...)``, as in the published package:
    an operation made from a function, which is called by its ``bind``.
    """
    primitive = options.pop('name', primitive)
    operation = options.pop('impl_fn', operation)
    takes_a_name = isinstance(primitive, str) and callable(operation)
    if takes_a_name and (options.keys() <= _OWN) and not _gives_labels(operation):
        made = ETPPrimitive(primitive, operation)
        REGISTERED.add(made)
        if options.get('batched'):
            BATCHED.add(made)
        return made
    return register_operation(primitive, operation, **options)


def _gives_labels(function: Any) -> bool:
    """Whether a function is one of labels: of an equation, its outputs and
    constants."""
    code = getattr(function, '__code__', None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names == ('eqn', 'outs', 'const')
