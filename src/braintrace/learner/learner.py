"""The learner: a compiled model that trains forward in time.

:class:`Learner` holds what its calls share: the model with its rule, the compiled
programs, and the states that calls read and write. The public methods are functions in
files by purpose: ``compiling.py``, ``training.py``, ``measuring.py``,
``saving.py`` and ``describing.py``. Their first argument is the learner.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.util import FlattedDict

from ..errors import ArgumentError, three_parts
from ..frontends.brainstate import matrices_kept
from ..frontends.module_states import known_states, module_states
from ..graph.etrace_graph import ETraceGraph
from ..program import Path
from ..program.step import path_name
from ..rules import Rule
from ..solver import Solver
from . import (
    carried,
    compiling,
    describing,
    measuring,
    model_states,
    saving,
    training,
)
from .access import place_inputs, synchronised
from .arguments import check_choice, check_numbers, check_optimizer, check_options
from .binding import StepBinding, bind_model, bind_step_fn
from .carried import (
    CarriedTraces,
    EligibilityTrace,
    make_traces,
    new_rule_state,
    rule_value,
)
from .model_states import StartValue, check_batch_size
from .models import interface_of
from .optimizers import update_by
from .placement import Placement
from .programs import Kept
from .sequences import TraceChoice, solver_of
from .spellings import check_subclass, member
from .transaction import uninterrupted

if TYPE_CHECKING:
    from ..report import CompilationReport


@dataclass(frozen=True)
class LearnerOptions:
    """Options that the programs and the traces of a learner are made for."""

    vjp_method: str
    block: int | None
    passes: int | None
    trace: TraceChoice
    trace_dtype: Any


def _fixed(name: str, of: Callable[[Learner], Any] | None = None) -> Any:
    """An option of a learner that can be read and not be set."""

    def refuse(learner: Learner, value: Any) -> None:
        raise AttributeError(
            three_parts(
                f'learner.{name} = {value!r}',
                'the programs and the traces of a learner are made for its options',
                f'learner.with_options({name}=...), another learner on the same model; '
                f'or compile(..., {name}=...)',
            )
        )

    return property(of or (lambda learner: getattr(learner._options, name)), refuse)


class Learner(brainstate.nn.Module):
    """A model with a learning rule.

    Call it instead of the model inside ``step_fn``. :meth:`etrace_grad` computes the
    gradient of a sequence.

    ``reach``: which paths credit takes.

    - 'local': inside each position.
    - 'readout': also through the memory of leaky linear read-outs (:class:`D_RTRL`,
      :class:`OSTLRecurrent`, and :class:`EProp` by default).
    - 'deep': inside a call from group to group along every path, and inside a group
      position by position; from call to call by local traces. The gradient of a call is
      that of BPTT where no group feeds itself across positions. Its states are stored,
      as in BPTT (:class:`D_RTRL`, :class:`pp_prop`).

    ``trace``: which parameters have traces. The others keep their one-step gradient. A
    fresh sequence never has traces of parameters on which its loss does not depend.

    - 'auto': all parameters that need one.
    - 'marked': parameters of marked operations.
    - 'credited': parameters that get a gradient through the outputs of the model. With
      'auto', other parameters have traces as well, because a later loss may depend on
      any state.
    - a function of the path that returns True or False.

    ``vjp_method``: 'single-step' or 'multi-step'. With 'multi-step' every call is a
    window. Reverse mode runs through all paths of the window, and the credit of the
    states at its start is multiplied by the traces. A :class:`MultiStepData` call is
    one window. Other calls are windows of one step: ``learner(x)``, and sequences
    without ``chunk_size``. Rules with another signal or recursion (random feedback, κ,
    a modulator, a scalar leak) run the steps of a window one by one.

    ``passes``: 1 carries traces; 2 stores the states of a fresh sequence and needs no
    traces. By default the learner chooses by memory. ``block``: the number of steps
    that are solved together. It does not change results, and is chosen automatically.

    ``vmap``: the model describes one sample. Its states get a batch axis in front, and
    the model is mapped over it.

    ``trace_dtype``: the type in which traces are stored. ``max_trace_bytes``: larger
    traces raise an error. ``check_finite``: a loss or gradient that is not finite
    raises an error.

    ``reach``, ``trace``, ``vjp_method``, ``passes``, ``block`` and ``trace_dtype`` can be
    read and not be set. :meth:`with_options` gives another learner on the same model.
    """

    __signature__: inspect.Signature
    rule: Rule
    _made_with: Callable[[], tuple[tuple, dict[str, Any]]]

    reach = _fixed('reach', lambda x: 'deep' if x.rule.deep else x.rule.reach)
    trace = _fixed('trace')
    vjp_method = _fixed('vjp_method')
    passes = _fixed('passes')
    block = _fixed('block')
    trace_dtype = _fixed('trace_dtype')

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """Keeps the arguments, for :meth:`with_options`."""
        made = super().__new__(cls)
        # A function, so that brainstate does not look for states in it.
        made._made_with = lambda: (args, options)
        return made

    def __init_subclass__(cls, **given: Any) -> None:
        """Shows a rule's own options, and those of every learner in place of
        ``**options``."""
        super().__init_subclass__(**given)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(_with_common_options(own))
        if cls.__module__.partition('.')[0] != __name__.partition('.')[0]:
            check_subclass(cls)

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule,
        *,
        reach: str | None = None,
        vjp_method: str = 'single-step',
        vmap: bool = False,
        block: int | None = None,
        passes: int | None = None,
        trace: TraceChoice = 'auto',
        trace_dtype: Any = None,
        max_trace_bytes: int = 8 * 2**30,
        check_finite: bool = False,
        mesh: Any = None,
        shard: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        if not isinstance(rule, Rule):
            raise ArgumentError(
                three_parts(
                    f'{type(self).__name__}(model, {rule!r})',
                    'the class of all learners needs a rule',
                    'the class of a rule, as braintrace.D_RTRL(model)',
                )
            )
        if reach is not None:
            check_choice('reach', reach, ('local', 'readout', 'deep'))
        check_choice('vjp_method', vjp_method, ('single-step', 'multi-step'))
        if reach in ('local', 'readout'):
            rule = replace(rule, reach=reach)
        # A rule that reads its traces by a signal of its own takes the steps of a
        # window one by one; the others go through the whole window in reverse.
        multi_step = (
            vjp_method == 'multi-step' and rule.has_trace and not rule.has_own_signal
        )
        if reach == 'deep':
            when = 'no group feeds itself across positions, inside a call'
            rule = replace(rule, deep=True, exact_when=when)
        self.rule = replace(rule, multi_step=multi_step)
        check_options(self.rule, block, passes, trace, trace_dtype, max_trace_bytes)
        self.model = model
        self.vmap = vmap
        self._options = LearnerOptions(vjp_method, block, passes, trace, trace_dtype)
        self.executor = compiling.new_executor(self)
        self.max_trace_bytes = max_trace_bytes
        self.check_finite = check_finite
        self.placement = Placement.of(mesh, shard)
        self.traces: dict[tuple, EligibilityTrace] = {}
        self._carried = CarriedTraces(self.traces)
        self.running_index = brainstate.LongTermState(jnp.zeros((), jnp.int32))
        self._example: tuple = ()
        self.rule_state = new_rule_state(self)
        # The shapes that the graph was compiled for: it serves calls of these.
        self._compiled_for: tuple = ()
        self._start: dict[Path, StartValue] = {}
        self._kept = Kept()
        self._process = os.getpid()

    if not TYPE_CHECKING:  # type checkers are to find names that are misspelt

        def __getattr__(self, name: str) -> Any:
            return member(self, name)

    # ------------------------------------------------------------ compiling

    compile_graph = compiling.compile_graph
    with_options = compiling.with_options

    # ------------------------------------------------------------ training

    update = training.update
    etrace_grad = training.etrace_grad
    etrace_evolve = training.etrace_evolve
    etrace_online = training.etrace_online
    stream = training.stream
    apply = training.apply
    update_predictor = training.update_predictor

    # ------------------------------------------------------------ measuring

    evaluate = measuring.evaluate
    gradient_check = measuring.gradient_check
    certificate = measuring.certificate
    memory_plan = measuring.memory_plan
    unmoved = measuring.unmoved

    # ------------------------------------------------------------ saving and copying

    weights = saving.weights
    set_weights = saving.set_weights
    save_weights = saving.save_weights
    load_weights = saving.load_weights
    save = saving.save
    load = saving.load
    __copy__ = saving.copied
    __deepcopy__ = saving.deeply_copied
    __reduce_ex__ = saving.refuse_pickling

    # ------------------------------------------------------------ looking

    show_graph = describing.show_graph
    write_report = describing.write_report
    get_etrace_of = describing.get_etrace_of
    traces_of = describing.traces_of
    __repr__ = describing.described
    _repr_html_ = describing.html

    @property
    def report(self) -> CompilationReport:
        """The findings of the compiler, the gradient that the rule gives each
        parameter, and the traces."""
        return describing.report_of(self)

    # ------------------------------------------------------------ what there is

    @property
    def is_compiled(self) -> bool:
        """Whether the learner is compiled."""
        return bool(self._compiled_for)

    def check_compiled(self) -> None:
        """Raise an error unless the learner is compiled."""
        if not self.executor.is_compiled:
            raise compiling.not_compiled(type(self).__name__)

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the model's step."""
        self.check_compiled()
        return self.executor.graph

    @property
    def param_states(self) -> FlattedDict:
        """The parameters of the model by path."""
        return FlattedDict(module_states(self.model, brainstate.ParamState))

    @property
    def hidden_states(self) -> FlattedDict:
        """The hidden states of the model by path."""
        return FlattedDict(module_states(self.model, brainstate.HiddenState))

    @property
    def other_states(self) -> FlattedDict:
        """States that are neither parameters nor hidden."""
        roles = (brainstate.ParamState, brainstate.HiddenState)
        states = module_states(self.model).items()
        return FlattedDict({p: s for p, s in states if not isinstance(s, roles)})

    @property
    def params(self) -> Any:
        """The parameters of a model other than a brainstate module, in the structure of
        its framework: a State of Params, an Equinox module, or the params of a
        function."""
        with synchronised(self):
            return interface_of(self.model).params

    @params.setter
    def params(self, value: Any) -> None:
        with synchronised(self):
            interface_of(self.model).params = value

    @property
    def state(self) -> Any:
        """The states of such a model, in the structure in which they were passed."""
        with synchronised(self):
            return interface_of(self.model).state

    @state.setter
    def state(self, value: Any) -> None:
        with synchronised(self):
            interface_of(self.model).state = value

    def _run_model(self, *args: Any) -> Any:
        """The model, or the model of one sample mapped over the batch axis of its
        states."""
        run: Any = self.model
        if self.vmap:
            states = brainstate.ShortTermState
            run = brainstate.nn.Vmap(
                self.model, vmap_states=states, vmap_out_states=states
            )
        with matrices_kept(self.model):
            return run(*args)

    def _held(self) -> tuple[brainstate.State, ...]:
        """The states that a compiled loop of brainstate refers to."""
        own: list[brainstate.State] = [self.running_index]
        own += [] if self.rule_state is None else [self.rule_state]
        return (*known_states(self.model).values(), *self.traces.values(), *own)

    def _count(self, calls: int) -> None:
        """Count calls since the last reset."""
        self.running_index.value = self.running_index.value + calls

    def optimizer_states(self, optimizer: Any) -> dict[str, brainstate.State]:
        """The states that an optimiser has for this learner, by name."""
        update_by(check_optimizer(optimizer), self.param_states, self._kept.optimizers)
        if optimizer in self._kept.optimizers:
            return {'state': self._kept.optimizers[optimizer]}
        own = {id(state) for state in self.param_states.values()}
        states = brainstate.graph.states(optimizer).items()
        return {path_name(p): s for p, s in states if id(s) not in own}

    def placed(self, *sequences: Any) -> tuple:
        """Sequences as JAX arrays, on the devices of the learner if it has several."""
        check_numbers(sequences)
        if self.placement is not None and self.placement.has_other_processes:
            return place_inputs(self, sequences, 1)
        return place_inputs(self, jax.tree.map(jnp.asarray, sequences), 1)

    @property
    def own_samples(self) -> slice:
        """The slice of the batch that belongs to this process. With one process it is
        the whole batch."""
        return slice(None) if self.placement is None else self.placement.own_samples

    def step_solver(
        self, step_fn: Callable[..., Any] | None = None, sequences: tuple = ()
    ) -> tuple[StepBinding, Solver]:
        """The traced step of the model, or of a step function on slices of sequences,
        and what solves it."""
        with synchronised(self):
            if step_fn is None:
                binding = bind_model(self, self._example)
            else:
                binding = bind_step_fn(self, step_fn, sequences)
            loss = step_fn is not None
            return binding, solver_of(self, binding, self.rule, loss)

    def is_news(self, text: str) -> bool:
        """Whether this text was not yet shown for this learner. Calling this function
        marks it as shown."""
        new = text not in self._kept.said
        self._kept.said.add(text)
        return new

    # ------------------------------------------------------------ the rule's own state

    @property
    def modulator(self) -> Any:
        """The constant modulator. It is None for rules without a modulator."""
        return rule_value(self) if self.rule.is_modulated else None

    @modulator.setter
    def modulator(self, value: Any) -> None:
        self.set_modulator(value)

    set_modulator = carried.set_modulator
    set_predictor = carried.set_predictor
    check_modulated = carried.check_modulated

    # ------------------------------------------------------------ starting again

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Reset the states of the model to those at which it was compiled, and the
        traces to zero.

        With ``batch_size``, new states are created for this batch size. Fresh sequences
        then start from them.
        """
        check_batch_size(batch_size)
        with synchronised(self):
            if batch_size is not None:
                model_states.resize(self, batch_size)
                make_traces(self)
            with uninterrupted:
                if batch_size is None:
                    model_states.restore_start(self)
                self._carried.clear()
                self.running_index.value = jnp.zeros((), jnp.int32)


def _with_common_options(own: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters of a rule's learner, with the options of every learner."""
    every = inspect.signature(Learner.__init__).parameters.values()
    common = [p for p in every if p.kind is p.KEYWORD_ONLY]
    shown = [p for p in own if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in shown}
    return shown + [p for p in common if p.name not in names]
