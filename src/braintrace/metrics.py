"""Footprint, sparsity and synaptic operations, as NeuroBench defines them.

A synaptic operation is the product of a weight and a value. The products of a step
(matrix products, convolutions, sparse products) are found in its JAX program, so any
layers can be used. The look-up of an embedding has no product. An operand that depends
on no input and no state is a weight, trained or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import brainstate
from .arrays import bytes_of
from .compat import (
    Equation,
    consts_of,
    evaluate_equation,
    in_float32,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
    trip_count,
)
from .errors import three_parts
from .frontends.brainstate import trace_step
from .frontends.module_states import module_states
from .learner import Learner
from .learner.access import synchronised
from .learner.arguments import length_of
from .learner.binding import StepBinding, bind_model, bind_step_fn
from .learner.carried import read_traces, rule_value
from .learner.model_states import start_values
from .learner.sequences import gradient_program_of
from .operations.record import operation_of
from .operations.synapses import at_synapses_p, to_columns_p, to_rows_p
from .program.normal import normal_form
from .text import size_text

__all__ = ['Inference', 'SynapticOperations', 'Update', 'inference', 'update']


@dataclass(frozen=True)
class SynapticOperations:
    """Operations of one step and one sample.

    ``dense``: products of all weights and values. ``effective_macs``: products in which
    neither is zero (multiply-accumulate operations). ``effective_acs``: the same number
    for operations whose values are spikes (-1, 0 or 1 in the whole sequence), where no
    multiplication is needed (accumulate operations).
    """

    dense: float
    effective_macs: float
    effective_acs: float


@dataclass(frozen=True)
class Inference:
    """The cost of running a model.

    ``footprint``: bytes of parameters and states. ``connection_sparsity``: the share of
    weights that are zero. ``activation_sparsity``: the share of zeros among the values
    that are multiplied by weights, without the inputs of the model; NaN if there are
    none.
    """

    footprint: int
    connection_sparsity: float
    activation_sparsity: float
    synaptic_operations: SynapticOperations

    def __str__(self) -> str:
        found = self.synaptic_operations
        return '\n'.join(
            [
                f'footprint            {size_text(self.footprint)}',
                f'connection sparsity  {self.connection_sparsity:.3f}',
                f'activation sparsity  {self.activation_sparsity:.3f}',
                'synaptic operations of a step',
                f'  dense              {found.dense:,.0f}',
                f'  effective MACs     {found.effective_macs:,.1f}',
                f'  effective ACs      {found.effective_acs:,.1f}',
            ]
        )


@dataclass(frozen=True)
class Update:
    """The cost of one update: the gradient of a whole sequence.

    ``memory``: bytes that are kept from update to update, by kind. ``forward``: dense
    synaptic operations of running the model. ``learning``: the operations that the
    gradient adds, for weights, signals and carried traces.
    """

    memory: dict[str, int]
    forward: float
    learning: float

    @property
    def footprint(self) -> int:
        """Bytes of parameters, states, traces, the rule state and the optimiser."""
        return sum(self.memory.values())

    @property
    def synaptic_operations(self) -> float:
        """Dense operations of the whole update."""
        return self.forward + self.learning

    def __str__(self) -> str:
        parts = ', '.join(f'{n} {size_text(b)}' for n, b in self.memory.items())
        return '\n'.join(
            [
                f'footprint            {size_text(self.footprint)} ({parts})',
                f'synaptic operations  {self.synaptic_operations:,.0f} '
                f'(forward {self.forward:,.0f}, learning {self.learning:,.0f})',
            ]
        )


def inference(
    model: brainstate.nn.Module, *sequences: Any, batch_size: int = 1
) -> Inference:
    """Measure a model, or the model of a learner, on a sequence, time first.

    Operations are those of one step, divided by ``batch_size``. A learner starts from
    the states of a fresh sequence, and a model from its current states. Nothing is
    changed.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(2, 3)
    >>> learner = braintrace.compile(net, 'd_rtrl', jnp.ones((1, 2)), batch_size=1)
    >>> found = braintrace.metrics.inference(learner, jnp.ones((5, 1, 2)))
    >>> found.synaptic_operations.dense, found.connection_sparsity
    (45.0, 0.0)
    """
    steps = length_of(sequences)
    binding, parameters, states = _bound(model, sequences)
    program = binding.info.program
    inputs = binding.inputs(sequences)
    counter = _Counter()
    for t in range(steps):
        values = {v: _Value(x, _LEARNED) for v, x in parameters.items()}
        values |= {v: _Value(x, _DATA | _STATE) for v, x in states.items()}
        for v in program.inputs:
            values[v] = _Value(inputs[v][t], _DATA)
        counter.begin_step()
        new = counter.run(program.closed, [values[v] for v in _invars(program.closed)])
        outvars = open_jaxpr(program.closed).outvars
        found = {v: x for v, x in zip(outvars, new, strict=True) if is_var(v)}
        moving: tuple[Any, ...] = (*program.hidden, *program.others)
        for state in moving:
            if state.outvar in found:
                states[state.invar] = found[state.outvar].array
    owner = model.model if isinstance(model, Learner) else model
    held = [state.value for state in module_states(owner).values()]
    return counter.result(sum(map(bytes_of, held)), steps * batch_size)


def update(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    optimizer: Any = None,
    fresh: bool = True,
    batch_size: int = 1,
) -> Update:
    """Measure one update: :meth:`Learner.etrace_grad` of a sequence, time first.

    ``fresh``: as in :meth:`Learner.etrace_grad`. Without it, traces are carried, which
    adds operations. ``optimizer``: its state is part of the footprint. Operations are
    divided by ``batch_size``. Nothing is computed or changed.
    """
    length = length_of(sequences)
    with synchronised(learner), learner.unmoved():
        binding = bind_step_fn(learner, step_fn, sequences)
        solver, program = gradient_program_of(learner, binding, learner.rule, fresh)
        traces = [] if fresh else read_traces(learner, solver)
        parameters, states = binding.read()
        inputs, weights = binding.inputs(sequences), jnp.ones(length)
        given = (parameters, states, traces, inputs, weights, 1.0)
        run = lambda *args: program.run(*args, rule_value(learner), masked=False)
        whole = _dense_operations(normal_form(jax.make_jaxpr(run)(*given)))
        forward = length * _dense_operations(binding.info.program.closed)
        memory = {
            'parameters': _bytes(learner.param_states.values()),
            'states': _bytes(
                (*learner.hidden_states.values(), *learner.other_states.values())
            ),
        }
        if not fresh:
            memory['traces'] = _bytes(learner.traces.values())
        if learner.rule_state is not None:
            memory['rule'] = _bytes([learner.rule_state])
        if optimizer is not None:
            memory['optimizer'] = _bytes(learner.optimizer_states(optimizer).values())
    return Update(memory, forward / batch_size, (whole - forward) / batch_size)


def _bytes(states: Any) -> int:
    return sum(bytes_of(state.value) for state in states)


def _invars(closed: Any) -> Sequence[Any]:
    return open_jaxpr(closed).invars


def _bound(model: Any, sequences: tuple) -> tuple[StepBinding, Any, Any]:
    """The step of a model with its parameters and states."""
    slice_of = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
    example = jax.tree.map(slice_of, sequences)
    if isinstance(model, Learner):
        with synchronised(model):
            binding = bind_model(model, example)
            parameters, states = binding.read()
            start = start_values(model)
            return binding, parameters, binding.with_values(states, start)
    if not isinstance(model, brainstate.nn.Module):
        raise TypeError(
            three_parts(
                f'metrics of a {type(model).__name__}',
                'its states and parameters are not known',
                'a learner of it, braintrace.compile(...), or a brainstate module',
            )
        )
    binding = StepBinding(model, trace_step(model, model, example, {}))
    return binding, *binding.read()


# ------------------------------------------------------------ counting values

_DATA, _STATE, _LEARNED = 1, 2, 4
"""What a value depends on: inputs or states; states; parameters."""


@dataclass(frozen=True)
class _Value:
    array: Any
    depends: int = 0


@dataclass
class _Product:
    """The operations of one product, over all steps."""

    dense: float = 0.0
    effective: float = 0.0
    reads_spikes: bool = True


@dataclass
class _Counter:
    """Runs programs equation by equation and counts."""

    products: dict[int, _Product] = field(default_factory=dict)
    """By the identity of their equations, which the program keeps."""
    weights: list[tuple[float, float]] = field(default_factory=list)
    """Of every weight how many there are and how many are not zero."""
    values: float = 0.0
    zeros: float = 0.0
    _weights_seen: dict[int, Any] = field(default_factory=dict)
    _values_seen: dict[int, Any] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Values are counted once a step, weights once."""
        self._values_seen = {}

    def run(self, closed: Any, given: Sequence[_Value]) -> list[_Value]:
        """The results of a program."""
        jaxpr = open_jaxpr(closed)
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, given, strict=True))
        consts = zip(jaxpr.constvars, consts_of(closed), strict=True)
        env |= {v: _Value(x) for v, x in consts}
        read = lambda atom: env[atom] if is_var(atom) else _Value(atom.val)
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Equation, given: list[_Value]) -> list[_Value]:
        kind = structure(eqn)
        if kind in ('custom', 'call'):
            (body,) = sub_programs(eqn)
            return self.run(body.jaxpr, given)
        if kind == 'cond':
            branches = read_branches(eqn)
            chosen = int(np.clip(int(given[0].array), 0, len(branches) - 1))
            return self.run(branches[chosen], given[1:])
        if kind == 'scan' and trip_count(eqn) is not None:
            return self._scan(eqn, given)
        if any(True for sub in sub_programs(eqn) for _ in _products(sub.jaxpr)):
            _warn_of(eqn)
        operation = operation_of(eqn)
        if operation is not None and operation.is_product:
            self._product(eqn, given)
        depends = 0
        for value in given:
            depends |= value.depends
        results = evaluate_equation(eqn, [value.array for value in given])
        return [_Value(x, depends) for x in results]

    def _scan(self, eqn: Equation, given: list[_Value]) -> list[_Value]:
        """A scan, step by step."""
        scan = read_scan(eqn)
        consts = given[: scan.num_consts]
        carry = given[scan.num_consts : scan.num_consts + scan.num_carry]
        sequences = given[scan.num_consts + scan.num_carry :]
        count = trip_count(eqn) or 0
        numbers = range(count)
        is_reversed = eqn.params.get('reverse', False)
        rows: list[list[_Value]] = []
        for t in reversed(numbers) if is_reversed else numbers:
            xs = [_Value(x.array[t], x.depends) for x in sequences]
            found = self.run(scan.body, [*consts, *carry, *xs])
            carry = found[: scan.num_carry]
            rows.append(found[scan.num_carry :])
        if is_reversed:
            rows.reverse()
        stacked = [
            _Value(jnp.stack([x.array for x in column]), column[0].depends)
            for column in zip(*rows, strict=True)
        ]
        return [*carry, *stacked]

    def _product(self, eqn: Equation, given: list[_Value]) -> None:
        numbers = [n for n, x in enumerate(given) if _is_inexact(x.array)]
        data = [n for n in numbers if given[n].depends & _DATA]
        fixed = [n for n in numbers if n not in data]
        # Spikes may be whole numbers or booleans; indices depend on no data.
        others = [n for n in range(len(given)) if n not in numbers]
        data += [n for n in others if given[n].depends & _DATA]
        if len(data) != 1 or len(fixed) != 1:
            return
        x, weight = given[data[0]], given[fixed[0]]
        has_indices = any(n not in (data[0], fixed[0]) for n in others)
        is_new = id(eqn) not in self.products
        entry = self.products.setdefault(id(eqn), _Product())
        arrays = [value.array for value in given]
        entry.effective += _operations(eqn, arrays, *data, *fixed)
        entry.dense += _dense_of(eqn, has_indices)
        size = jnp.abs(x.array)
        entry.reads_spikes &= bool(jnp.all((size == 0) | (size == 1)))
        if is_new and not _seen_before(weight.array, self._weights_seen):
            count = float(jnp.size(weight.array))
            if has_indices:  # stored entries of a matrix whose others are absent
                count = float(x.array.shape[0] * eqn.outvars[0].aval.shape[0])
            self.weights.append((count, float(jnp.count_nonzero(weight.array))))
        is_activation = x.depends & (_STATE | _LEARNED)
        if is_activation and not _seen_before(x.array, self._values_seen):
            self.values += jnp.size(x.array)
            self.zeros += jnp.size(x.array) - float(jnp.count_nonzero(x.array))

    def result(self, footprint: int, divided_by: int) -> Inference:
        """The measures, operations divided by the number of steps and samples."""
        each = self.products.values()
        total = lambda numbers: sum(numbers) / divided_by
        operations = SynapticOperations(
            total(p.dense for p in each),
            total(p.effective for p in each if not p.reads_spikes),
            total(p.effective for p in each if p.reads_spikes),
        )
        count = sum(count for count, _ in self.weights)
        present = sum(present for _, present in self.weights)
        return Inference(
            footprint,
            1 - present / count if count else 0.0,
            self.zeros / self.values if self.values else float('nan'),
            operations,
        )


def _seen_before(array: Any, seen: dict[int, Any]) -> bool:
    """Whether an array is among those seen, to which it is then added."""
    is_known = id(array) in seen
    seen[id(array)] = array  # kept, so that no other array gets its identity
    return is_known


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _operations(eqn: Equation, operands: Sequence[Any], *counted: int) -> float:
    """How many pairs of two operands are multiplied, neither of which is zero: the
    product of ones in their places."""
    ones = list(operands)
    for n in counted:
        ones[n] = (jnp.asarray(operands[n]) != 0).astype(jnp.float32)
    (result, *_) = evaluate_equation(in_float32(eqn), ones)
    return float(np.asarray(result, np.float64).sum())


def _dense_of(eqn: Equation, has_indices: bool) -> float:
    """How many pairs of operands a product multiplies."""
    shapes = [v.aval for v in eqn.invars]
    out = eqn.outvars[0].aval
    if has_indices:
        # All of a matrix of which only entries are stored, for each column of data.
        rows = max((x for x in shapes if _is_inexact(x)), key=lambda x: x.ndim)
        columns = out.shape[1] if out.ndim > 1 else 1
        return float(rows.shape[0] * out.shape[0] * columns)
    key = (eqn.primitive, str(eqn.params), *(x.shape for x in shapes))
    if key not in _DENSE:
        ones = [jnp.ones(x.shape) for x in shapes]
        _DENSE[key] = _operations(eqn, ones, *range(len(ones)))
    return _DENSE[key]


_DENSE: dict[tuple, float] = {}
"""Operations of products by their shapes."""


# ------------------------------------------------------------ counting programs

_OF_SYNAPSES = (to_columns_p, to_rows_p, at_synapses_p)
"""What programs of a gradient have in place of a model's sparse products."""


def _products(jaxpr: Any, times: int = 1) -> Iterator[tuple[Equation, int]]:
    """The products of a program, with how often each is run."""
    for eqn in open_jaxpr(jaxpr).eqns:
        operation = operation_of(eqn)
        is_product = operation is not None and operation.is_product
        if is_product or eqn.primitive in _OF_SYNAPSES:
            yield eqn, times
        count = trip_count(eqn)
        bodies = [list(_products(s.jaxpr, times)) for s in sub_programs(eqn)]
        if not any(bodies):
            continue
        kind = structure(eqn)
        if kind == 'cond':
            yield from max(bodies, key=lambda found: sum(map(_size, found)))
            continue
        if kind in ('scan', 'while') and count is None:
            _warn_of(eqn)
        for found in bodies:
            for product, n in found:
                yield product, n * (count or 1)


def _size(found: tuple[Equation, int]) -> float:
    """Dense operations of a product that is run so often."""
    eqn, times = found
    if eqn.primitive in _OF_SYNAPSES:
        return times * _all_of_matrix(eqn)
    has_indices = any(not _is_inexact(v.aval) for v in eqn.invars)
    return times * _dense_of(eqn, has_indices)


def _all_of_matrix(eqn: Equation) -> float:
    """The operations of a product by synapses, or of its gradient, as if all entries of
    the matrix were stored: rows × columns × samples."""
    *_, first, second = (v.aval for v in eqn.invars)
    if eqn.primitive is at_synapses_p:
        return float(first.shape[0] * second.size)
    return float(second.size * eqn.outvars[0].aval.shape[0])


def _dense_operations(jaxpr: Any) -> float:
    return sum(map(_size, _products(jaxpr)))


def _warn_of(eqn: Equation) -> None:
    warnings.warn(
        f'a loop of unknown length ({eqn.primitive}) has products; they are counted '
        'once or not at all',
        stacklevel=4,
    )
