"""Every access to jaxpr internals that may change from one JAX release to the next.

No other file imports ``jax.extend`` or reads the parameters of call-like equations by
name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

if TYPE_CHECKING:  # JAX gives these no useful types
    from typing import Any as Atom
    from typing import Any as ClosedJaxpr
    from typing import Any as Equation
    from typing import Any as Jaxpr
    from typing import Any as Literal
    from typing import Any as Primitive
    from typing import Any as Var
else:
    Var = jex.Var
    Literal = jex.Literal
    Jaxpr = jex.Jaxpr
    ClosedJaxpr = jex.ClosedJaxpr
    Equation = jex.JaxprEqn
    Primitive = jex.Primitive
    Atom = Var | Literal


def _internal(name: str) -> Any:
    """A name that JAX 0.10 moved from ``jax.core`` to ``jax.extend.core``."""
    return getattr(jex, name) if hasattr(jex, name) else getattr(jax.core, name)


_DebugInfo = _internal('DebugInfo')
_new_equation = _internal('new_jaxpr_eqn')
_opaque_state = _internal('get_opaque_trace_state')

_ONE_CLASS = jex.Jaxpr is jex.ClosedJaxpr
"""Since JAX 0.11 a program is closed by attaching constants to it."""


class _Unknown:
    """Takes the place of a constant that an open program does not have."""

    def __repr__(self) -> str:
        return 'unknown'


_UNKNOWN = _Unknown()


# ---------------------------------------------------------------- configuration


def _global_x64() -> bool:
    """``jax_enable_x64`` outside of any ``with jax.enable_x64(...)``."""
    return _in_new_thread(lambda: jax.config.read('jax_enable_x64'))


def _in_new_thread(read: Callable[[], Any]) -> Any:
    """What a function gives outside of all contexts and transformations: these belong
    to their thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(read).result()


@contextlib.contextmanager
def keep_x64() -> Iterator[None]:
    """Restore ``jax_enable_x64`` afterwards."""
    before = _global_x64()
    try:
        yield
    finally:
        jax.config.update('jax_enable_x64', before)


# --------------------------------------------------------------- variables and programs


def new_var(aval: Any) -> Var:
    """A fresh variable."""
    return jex.Var(aval)


def is_var(atom: Atom) -> bool:
    """True unless the atom is a literal constant."""
    return not isinstance(atom, jex.Literal)


def is_differentiable(atom: Atom) -> bool:
    """True for values that can carry a derivative: floating point or complex."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The open program inside a closed one; an open one as it is."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants of a closed program; none for an open one."""
    if not isinstance(jaxpr, jex.ClosedJaxpr):
        return ()
    return () if any(value is _UNKNOWN for value in jaxpr.consts) else jaxpr.consts


def make_jaxpr(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    equations: Sequence[Equation],
    like: Jaxpr | None = None,
) -> Jaxpr:
    """Assemble a program from its parts; ``like`` is one of the same inputs and
    outputs, for its names."""
    effects = frozenset().union(*(eqn.effects for eqn in equations))
    names = ('',) * len(invars), ('',) * len(outvars)
    info = (
        _DebugInfo('braintrace', 'braintrace', *names)
        if like is None
        else like.debug_info
    )
    parts = (list(constvars), list(invars), list(outvars), list(equations))
    build: Any = jex.Jaxpr
    if _ONE_CLASS:
        # Without attached values JAX would count the constvars among the invars.
        unknown = [_UNKNOWN] * len(parts[0])
        return build(*parts, effects, info, consts=unknown)
    return build(*parts, effects, info)


def trace(function: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """The program of a function of arrays."""
    return jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    )


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """Attach constants to a program."""
    return jex.ClosedJaxpr(jaxpr, list(consts))


def values_of(atoms: Iterable[Atom], env: Mapping[Var, Any]) -> list[Any]:
    """The values of variables, and of literals."""
    return [env[v] if is_var(v) else v.val for v in atoms]


def changed(
    program: Any,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    equations: Sequence[Equation] | None = None,
) -> Any:
    """The same program with other inputs, outputs or equations; closed if it was."""
    old = open_jaxpr(program)
    invars = old.invars if invars is None else invars
    outvars = old.outvars if outvars is None else outvars
    same = len(invars) == len(old.invars) and len(outvars) == len(old.outvars)
    new = make_jaxpr(
        old.constvars,
        invars,
        outvars,
        old.eqns if equations is None else equations,
        like=old if same else None,
    )
    is_closed = isinstance(program, jex.ClosedJaxpr)
    return close(new, consts_of(program)) if is_closed else new


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Run a program."""
    return jax.core.eval_jaxpr(jaxpr, consts, *args)


def evaluate_equation(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """Run one equation on the values of its operands."""
    invars = [new_var(v.aval) for v in eqn.invars]
    outvars = [new_var(v.aval) for v in eqn.outvars]
    jaxpr = make_jaxpr(
        [], invars, outvars, [eqn.replace(invars=invars, outvars=outvars)]
    )
    return evaluate(jaxpr, (), *operands)


def new_primitive(name: str) -> Any:
    """A primitive without any rules yet."""
    return jex.Primitive(name)


def new_equation(
    operands: Sequence[Atom], out: Var, primitive: Primitive, **params: Any
) -> Equation:
    """An equation of one result."""
    return _new_equation(list(operands), [out], primitive, params, frozenset())


def add_equation(a: Atom, b: Atom, out: Var) -> Equation:
    """An equation ``out = a + b``."""
    return new_equation([a, b], out, jax.lax.add_p)


def copy_equation(a: Atom, out: Var) -> Equation:
    """An equation ``out = a``."""
    return new_equation([a], out, jex.primitives.copy_p)


# ---------------------------------------------------------------- sub-programs


class SubProgram(NamedTuple):
    """A program found by type among the parameters of an equation."""

    key: tuple[str, int | None]
    jaxpr: Any


def sub_programs(eqn: Equation) -> Iterator[SubProgram]:
    """All sub-programs of an equation, in a fixed order."""
    for name, value in eqn.params.items():
        if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
            yield SubProgram((name, None), value)
        elif type(value) in (tuple, list):
            for i, item in enumerate(value):
                if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
                    yield SubProgram((name, i), item)


def replace_sub_programs(
    eqn: Equation, new: dict[tuple[str, int | None], Any]
) -> Equation:
    """The equation with some of its sub-programs exchanged."""
    params = dict(eqn.params)
    for (name, i), jaxpr in new.items():
        if i is None:
            params[name] = jaxpr
        else:
            items = list(params[name])
            items[i] = jaxpr
            params[name] = type(params[name])(items)
    return eqn.replace(params=params)


loop_p = jex.Primitive('loop')
"""A while loop that can be differentiated in reverse; ``program/loops.py`` says how."""
loop_p.multiple_results = True
loop_linear_p = jex.Primitive('loop_linear')
"""Its derivative, a linear function of tangents or of cotangents."""
loop_linear_p.multiple_results = True

_CONTROL = {'scan': 'scan', 'while': 'while', 'cond': 'cond', 'loop': 'scan'}
_CUSTOM = ('custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr')


def structure(eqn: Equation) -> str:
    """How an equation uses its sub-programs: 'scan', 'while', 'cond', 'custom', 'call'
    or 'none'.

    A plain call is recognised by type alone: one sub-program that takes the equation's
    operands and gives its results.
    """
    name = eqn.primitive.name
    if name in _CONTROL:
        return _CONTROL[name]
    bodies = list(sub_programs(eqn))
    if len(bodies) != 1:
        return 'none'
    body = open_jaxpr(bodies[0].jaxpr)
    if len(body.invars) != len(eqn.invars) or len(body.outvars) != len(eqn.outvars):
        return 'none'
    if any(
        a.aval.shape != b.aval.shape
        for a, b in zip(body.invars, eqn.invars, strict=True)
        if hasattr(a.aval, 'shape')
    ):
        return 'none'
    return 'custom' if name in _CUSTOM else 'call'


def has_reverse_only(eqn: Equation) -> bool:
    """True if an equation has a derivative of its own making for reverse mode alone."""
    inside = (e for sub in sub_programs(eqn) for e in open_jaxpr(sub.jaxpr).eqns)
    return eqn.primitive.name.startswith('custom_vjp_call') or any(
        map(has_reverse_only, inside)
    )


_CALLBACKS = ('pure_callback', 'io_callback')


def is_opaque(eqn: Equation) -> bool:
    """True for what cannot be differentiated in reverse: calls of Python code, and
    loops of unknown length that ``program/loops.py`` does not follow.

    Without differentiable results there is nothing to differentiate.
    """
    known = structure(eqn) != 'while' and eqn.primitive.name not in _CALLBACKS
    return not known and any(map(is_differentiable, eqn.outvars))


def can_fail(program: Any) -> bool:
    """Whether a program runs code that may raise an error while the program runs: calls
    of Python, and whatever else has effects."""
    jaxpr = open_jaxpr(program)
    if jaxpr.effects:
        return True
    inside = (sub.jaxpr for eqn in jaxpr.eqns for sub in sub_programs(eqn))
    own = any(eqn.primitive.name in _CALLBACKS for eqn in jaxpr.eqns)
    return own or any(map(can_fail, inside))


class Scan(NamedTuple):
    """A scan, or a loop: operands are consts, carry, xs; results are carry, ys.

    Before them a loop has operands that only its condition reads: ``num_ignored``.
    ``key``: the name of the body among the sub-programs. ``length``: of a scan.
    """

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    num_ignored: int = 0
    key: tuple[str, int | None] = ('jaxpr', None)
    length: int | None = None


def read_scan(eqn: Equation) -> Scan:
    """The parts of a scan or loop equation."""
    p = eqn.params
    if eqn.primitive is loop_p:
        body, first = p['body_jaxpr'], p['cond_nconsts']
        key = ('body_jaxpr', None)
        return Scan(body, p['body_nconsts'], len(eqn.outvars), first, key)
    if 'ft_in' in p:  # since JAX 0.11: a tree of consts, carry and xs
        num_consts, num_carry, _ = map(len, p['ft_in'].unpack())
    else:
        num_consts, num_carry = p['num_consts'], p['num_carry']
    return Scan(p['jaxpr'], num_consts, num_carry, length=p['length'])


def trip_count(eqn: Equation) -> int | None:
    """How often the body of an equation is run; None for a loop of unknown length."""
    kind = structure(eqn)
    if kind in ('scan', 'while'):
        return eqn.params.get('length')
    return 1


def in_float32(eqn: Equation) -> Equation:
    """A product that adds up in float32, whatever its operands are."""
    if eqn.params.get('preferred_element_type') is None:
        return eqn
    return eqn.replace(params={**eqn.params, 'preferred_element_type': jnp.float32})


def read_while(eqn: Equation) -> dict[str, Any]:
    """The parts of a while equation: condition, body, how many constants each has."""
    names = ('cond_jaxpr', 'body_jaxpr', 'cond_nconsts', 'body_nconsts')
    return {name: eqn.params[name] for name in names}


def read_branches(eqn: Equation) -> Sequence[ClosedJaxpr]:
    """The branches of a cond equation; its first operand chooses."""
    return eqn.params['branches']


def solver_constants(eqn: Equation) -> range:
    """Operands of a linear solve that serve its solver only, such as a factorised
    matrix: no derivative."""
    matvec, *solvers = eqn.params['const_lengths']
    return range(matvec, matvec + sum(solvers))


# -------------------------------------------------------- where an equation was written


def frames_of(eqn: Equation) -> list[Any]:
    """The frames of Python in which an equation was traced, innermost first."""
    stack = eqn.source_info.traceback
    return [] if stack is None else list(stack.frames)


def defined_in(jaxpr: Any) -> str:
    """The file and line of the function that a program was traced from; empty if
    unknown."""
    defined = getattr(open_jaxpr(jaxpr).debug_info, 'func_src_info', '') or ''
    return defined.partition(' at ')[2]


def inlined(
    eqn: Equation, caller: Equation, at_caller: bool, **changes: Any
) -> Equation:
    """An equation of a called program as it stands in the calling one; ``at_caller``:
    with the source line of the call. Names of scopes add up."""
    info = eqn.source_info
    if at_caller:
        info = info.replace(traceback=caller.source_info.traceback)
    info = info.replace(name_stack=caller.source_info.name_stack + info.name_stack)
    return eqn.replace(source_info=info, **changes)


MARK = 'etrace:'
"""Names of scopes that begin so mark an operation whose parameters are to be traced."""


def scope(eqn: Equation) -> str:
    """Names of the scopes in which an equation was traced."""
    return str(eqn.source_info.name_stack)


@functools.cache
def sequential_options() -> dict[str, Any] | None:
    """Options of ``jax.jit`` for a program of small operations on CPUs: in an order
    that is not meant for several threads, because handing an operation to another
    thread takes longer than the operation.

    None elsewhere, and if XLA does not know them. Only for a call that is not part of
    another compiled program.
    """
    if jax.default_backend() != 'cpu':
        return None
    options = {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return None
    return options


def is_at_top() -> bool:
    """Whether no transformation of JAX is around, so that a call runs at once."""
    return _trace_state() == _top_state()


def _trace_state() -> Any:
    return _opaque_state(convention='flax')


@functools.cache
def _top_state() -> Any:
    return _in_new_thread(_trace_state)
