"""The learner: a compiled model that trains forward in time.

:class:`Learner` has the calls of a user and all that they share: the model with its
rule, the programs made so far, and the states that calls read and write. How a call
runs is in ``calls.py``, what is measured in ``measuring.py``, the traces are in
``carried.py``.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, overload

import brainstate
import jax
import jax.numpy as jnp
from brainstate.util import FlattedDict

from ..analysis.graph import ETraceGraph
from ..errors import ArgumentError, three_parts
from ..frontends.module_states import known_states, module_states
from ..program import Path
from ..program.data import MultiStepData, SingleStepData, first_step
from ..program.step import path_name
from ..rules import Rule
from ..solver import Factorised
from ..solver.factors import FactorTrace
from . import (
    access,
    calls,
    carried,
    chunks,
    compiling,
    credit_warnings,
    describing,
    measuring,
    model_states,
    programs,
    rule_state,
)
from .arguments import (
    LOSS_OUTPUTS,
    check_call,
    check_choice,
    check_modulator,
    check_optimizer,
    check_options,
    length_of,
)
from .batch import batch_explained, check_batch_size, check_rank
from .binding import StepBinding
from .calls import GradientCall
from .carried import CarriedTraces
from .certificate import Certificate, check_directions
from .check import GradientCheck, RuleComparison
from .losses import results
from .memory import MemoryPlan
from .model_states import Shapes
from .models import interface_of
from .optimizers import update_by
from .placement import Placement
from .programs import ProgramCache, TraceChoice
from .sequences import Solver
from .spellings import check_subclass, member
from .state import EligibilityTrace, StartValue
from .stream import Stream
from .weights import (
    Weights,
    check_paths,
    path_of_parameter,
    read_safetensors,
    read_weights,
    selected,
    write_safetensors,
    write_weights,
)

if TYPE_CHECKING:
    from ..report import CompilationReport


@dataclass
class Kept:
    """Caches of a learner, which brainstate must not take for states.

    ``optimizers``: the states of optax transformations. ``shapes``: those of the hidden
    states that were compiled for. ``has_batch_size``: whether `compile` was given one.
    ``said``: warnings that were given. ``codes``: how many step functions of one code
    were bound.
    """

    programs: ProgramCache = field(default_factory=ProgramCache)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    has_batch_size: bool = False
    said: set[str] = field(default_factory=set)
    codes: Counter[tuple] = field(default_factory=Counter)


class Learner(brainstate.nn.Module):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad`
    differentiates a whole sequence.

    ``reach``: 'local'; 'readout' for credit through the memory of leaky linear
    read-outs, carried in the traces (:class:`D_RTRL`, :class:`OSTLRecurrent` and
    :class:`EProp`, which has it by default); or 'deep' for credit that passes from
    layer to layer inside a window. ``vjp_method``: 'single-step', or 'multi-step',
    where every call is a window: reverse mode through the whole of its steps, and the
    credit of the states at its start is multiplied by the traces. A
    :class:`MultiStepData` call is one window. All others (``learner(x)``, and sequences
    without ``chunk_size``) are windows of one step: a loss reaches the traces of all
    states that the step reads, other units' included. A rule with a signal or a
    recursion of its own (random feedback, κ, a modulator, a scalar leak) takes the
    steps of a window one by one. ``vmap``: the model describes one sample; its states
    have a batch axis in front and it is mapped over them. ``block``: steps solved
    together; chosen automatically and never visible in a result. ``passes``: 1 carries
    traces, 2 keeps the states of a fresh sequence and carries none; by default
    whichever fits. ``trace``: 'auto', 'marked' (parameters used through marked
    operations), 'credited' (those to which the model's outputs give credit; 'auto'
    carries traces of the others too, since a later loss may read any state) or a
    predicate on paths; the others keep their one-step gradient. A fresh sequence has no
    traces of parameters on which its loss never depends.
    ``trace_dtype``: storage type of the traces; more than ``max_trace_bytes`` is
    refused. ``check_finite``: raise on a loss or gradient that is not finite.
    """

    __signature__: inspect.Signature

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
        self.vjp_method = vjp_method
        self.rule = replace(rule, deep=reach == 'deep', multi_step=multi_step)
        check_options(self.rule, block, passes, trace, trace_dtype, max_trace_bytes)
        self.model = model
        self.vmap = vmap
        self.executor = compiling.new_executor(self)
        self.block = block
        self.passes = passes
        self.trace = trace
        self.trace_dtype = trace_dtype
        self.max_trace_bytes = max_trace_bytes
        self.check_finite = check_finite
        self.placement = Placement.of(mesh, shard)
        self.traces: dict[tuple, EligibilityTrace] = {}
        self._carried = CarriedTraces(self.traces)
        self.running_index = brainstate.LongTermState(jnp.zeros((), jnp.int32))
        self._example: tuple = ()
        self.rule_state = self._new_rule_state()
        # The shapes that the graph was compiled for: it serves calls of these.
        self._compiled_for: tuple = ()
        self._start: dict[Path, StartValue] = {}
        self._kept = Kept()
        self._process = os.getpid()

    if not TYPE_CHECKING:  # type checkers are to find names that are misspelt

        def __getattr__(self, name: str) -> Any:
            return member(self, name)

    # ------------------------------------------------------------ compiling

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for example inputs of one step.

        Its current states are where a fresh sequence starts.
        """
        with self._followed():
            compiling.compile_learner(self, first_step(args))

    # ------------------------------------------------------------ one step

    def update(self, *args: Any, modulator: Any = None) -> Any:
        """One step: the model's output; states and traces advance.

        Under ``brainstate.transform.grad`` the parameters' gradient is the rule's
        online gradient. Inputs wrapped in :class:`MultiStepData` are a window of steps:
        with ``vjp_method='multi-step'`` exact reverse mode inside, traces across. A
        plain call is a window of one step then. Inside a ``step_fn`` this is the call
        that is traced. ``modulator``: see :class:`ThreeFactor`.
        """
        window = any(isinstance(a, MultiStepData) for a in args)
        wrapped = (SingleStepData, MultiStepData)
        args = tuple(a.data if isinstance(a, wrapped) else a for a in args)
        args = self._placed(args, int(window))
        check_rank(args, self._example, int(window))
        now = lambda: model_states.state_shapes(self.hidden_states)
        compiled = (self._example, self._kept.shapes)
        explained = batch_explained(args, *compiled, now, window)
        with self._synchronised(), explained:
            return calls.run_step(self, args, window, modulator)

    # ------------------------------------------------------------ sequences

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: Literal[False] = False,
        return_value: Literal[False] = False,
        fresh: bool = False,
        params: Any = None,
    ) -> dict[Path, Any]: ...

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        has_aux: Literal[True],
        **options: Any,
    ) -> tuple[Any, ...]: ...

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        return_value: Literal[True],
        **options: Any,
    ) -> tuple[Any, ...]: ...

    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: bool = False,
        return_value: bool = False,
        fresh: bool = False,
        params: Any = None,
    ) -> Any:
        """Gradients of a whole sequence, by path; those of a model that is no
        brainstate module in the structure that its framework's optimisers take.

        ``step_fn(*slices)`` calls the learner and returns a scalar loss (or ``(loss,
        aux)``). ``mask`` (T,) weights the losses; 'mean' divides by max(Σ mask, 1). A
        loss of mask 0 contributes nothing, even if it or the inputs of its step are
        NaN. ``fresh=True``: the sequence is whole, so states start from where they were
        compiled and the traces are discarded afterwards. ``weights`` selects
        parameters: a list of paths or states, or a mapping to states, whose keys the
        gradients then have.

        ``chunk_size=k`` passes windows of k steps to ``step_fn``, which wraps them in
        :class:`MultiStepData` and returns the k losses of a window, or one for the
        whole of it; then ``mask`` has one weight for each window. Reverse mode is exact
        inside each window, whatever ``vjp_method`` says, and traces go across. Without
        it, or with 1, a learner with ``vjp_method='multi-step'`` takes windows of one
        step.

        ``params`` (a Flax or Equinox module, or the params of a function): a fresh
        sequence with these weights, nothing of the learner changed; this also works
        inside ``jax.jit`` and the like.

        With ``return_value`` the losses follow: as they are ('per_step'), times their
        mask ('masked') or reduced to one number ('scalar'). With ``has_aux`` the
        auxiliary values follow, stacked over time.
        """
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_choice('reduction', reduction, ('mean', 'sum'))
        chosen = selected(weights, self.param_states)
        call = GradientCall(sequences, step_fn, mask, reduction, has_aux, fresh)
        if params is not None:
            found = calls.gradients_at(self, call, params, chunk_size)
        else:
            with self._synchronised():
                call = replace(call, sequences=self._placed(sequences, 1))
                if chunk_size in (None, 1):
                    found = calls.gradients_in_steps(self, call)
                else:
                    found = chunks.gradients_in_chunks(self, call, chunk_size)
        gradients, losses, counts, aux = found
        if chosen is None:
            gradients = interface_of(self.model).gradients(gradients)
        given = (mask, chosen, loss_output, return_value, has_aux)
        return results(gradients, losses, counts, aux, *given)

    def etrace_evolve(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance states and traces along a sequence without a loss.

        ``step_fn(*slices)`` calls the learner, by default on all of them; what it
        returns is given, stacked over time, if ``return_outputs``. ``chunk_size=k``
        hands windows of k steps to it, as :meth:`etrace_grad` does; outputs are stacked
        over windows then.
        """
        with self._synchronised():
            sequences = self._placed(sequences, 1)
            if chunk_size in (None, 1):
                outputs = calls.evolve(self, sequences, step_fn)
            else:
                outputs = chunks.evolve_in_chunks(self, sequences, step_fn, chunk_size)
        return outputs if return_outputs else None

    def etrace_online(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        optimizer: Any,
        update_every: int = 1,
        mask: Any = None,
    ) -> jax.Array:
        """Train along a sequence: weights change every ``update_every`` steps inside
        the compiled loop.

        ``optimizer``: one of braintools, or any optax transformation; it is given the
        sum of the steps' gradients, and its state is kept from call to call. A masked
        step does not contribute to the gradient, and if all steps since the last update
        are masked, there is no update; states and traces advance. Returns the loss of
        every step.
        """
        interface_of(self.model).check_loop_optimizer(optimizer)
        check_optimizer(optimizer)
        length_of(sequences, step_fn)
        if not isinstance(update_every, int) or update_every < 1:
            raise ValueError(
                three_parts(
                    f'update_every={update_every!r}',
                    'weights change after so many steps',
                    'a whole number of at least 1',
                )
            )
        with self._synchronised():
            sequences = self._placed(sequences, 1)
            return calls.train_online(
                self, sequences, step_fn, optimizer, update_every, mask
            )

    def stream(
        self,
        step_fn: Callable[..., Any],
        optimizer: Any = None,
        *,
        chunk: int | None = None,
        decay: float | None = None,
    ) -> Stream:
        """Learn from data that arrive one step at a time.

        ``step_fn(*inputs)`` calls the learner and returns a scalar loss, or ``(loss,
        aux)``. ``optimizer``: as for :meth:`etrace_online`; None if weights are not to
        change. ``chunk``: calls bring 1 to so many steps, time first. ``decay``:
        gradients of :meth:`Stream.gradient` are added up, the sum multiplied by this
        number at every step, for rewards that come later.
        """
        self.check_compiled()
        return Stream(self, step_fn, optimizer, chunk=chunk, decay=decay)

    # ------------------------------------------------------------ updates

    def apply(self, gradients: dict[Path, Any], optimizer: Any) -> None:
        """Change the parameters by an optimiser of braintools or optax, whose state is
        kept.

        Parameters without a gradient stay as they are.
        """
        parameters = self.param_states
        gradients = interface_of(self.model).by_path(gradients)
        check_paths('gradients', gradients, parameters)
        update = update_by(
            check_optimizer(optimizer), parameters, self._kept.optimizers
        )
        make = lambda: brainstate.transform.jit(update)
        # It closes over states alone, so a trace around it does not matter.
        program = self._program('apply', (optimizer, *parameters.values()), make, True)
        still = {
            path: s.value for path, s in parameters.items() if path not in gradients
        }
        moving = (*parameters.values(), *self.optimizer_states(optimizer).values())
        with self._synchronised(), access.restored_on_error(moving):
            program({**jax.tree.map(jnp.zeros_like, still), **gradients})
            for path, value in still.items():
                parameters[path].value = value

    def update_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else
        changed; its error."""
        with self._synchronised():
            solved = calls.solve(self, GradientCall(sequences, step_fn)).solved
            self._write_rule_state(self._next_rule_state(solved))
        return float(solved.predictor_error)

    # ------------------------------------------------------------ measuring

    def evaluate(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None
    ) -> Any:
        """What ``step_fn``, by default the learner, gives at every step of a fresh
        sequence.

        Stacked over time. Forward only: nothing is learned, and states, traces and
        random numbers stay as they are.
        """
        length_of(sequences, step_fn)
        with self._synchronised():
            return measuring.evaluate(self, self._placed(sequences, 1), step_fn)

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck: ...

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any],
        mask: Any = None,
        reduction: str = 'mean',
    ) -> RuleComparison: ...

    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any] | None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck | RuleComparison:
        """Compare gradients of a fresh sequence with BPTT's: this rule's, or those of
        ``rules``.

        Nothing is changed. ``rules``: names or classes of rules, with the options they
        have by default, :class:`ETraceConfig`, or learners for their rule with its
        options, as ``braintrace.SnAp(model, n=2)``, its modulator or its predictor.
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        own = (self.rule, self._rule_value())
        compared = [own] if rules is None else measuring.rules_of(rules)
        with self._synchronised(), self.unmoved():
            sequences = self._placed(sequences, 1)
            call = GradientCall(sequences, step_fn, mask, reduction)
            checks = measuring.compare_with_bptt(self, call, compared)
        return checks[0] if rules is None else RuleComparison(checks)

    def certificate(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        directions: int = 8,
        mask: Any = None,
        reduction: str = 'mean',
        per_parameter: bool = False,
        groups: Mapping[str, Sequence[Path]] | None = None,
        seed: int = 0,
    ) -> Certificate:
        """Whether the rule's gradient of a fresh sequence points downhill.

        ⟨g_true, g⟩/|g|², where g is the gradient of :meth:`etrace_grad` and g_true that
        of BPTT, by forward mode through the uncut steps: exact, at the cost of a few
        forward passes, and in memory that does not grow with the sequence for rules
        that carry traces. Random ``directions`` beside it estimate the cosine.

        ``per_parameter``: a row for each parameter array. ``groups``: a row for each of
        these lists of paths, by name; a path stands for all parameters below it.
        ``step_fn``, ``mask`` and ``reduction`` as in :meth:`etrace_grad`; auxiliary
        values are ignored. Nothing is changed.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> net = brainstate.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(net, 'bptt', jnp.ones((2, 3)), batch_size=2)
        >>> step = lambda x: jnp.mean((learner(x) - 1) ** 2)
        >>> found = learner.certificate(jnp.ones((5, 2, 3)), step_fn=step)
        >>> round(found.descent, 3), found.descends
        (1.0, True)
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        check_directions(directions)
        length_of(sequences)
        with self._synchronised(), self.unmoved():
            call = GradientCall(self._placed(sequences, 1), step_fn, mask, reduction)
            return measuring.certify(
                self, call, directions, per_parameter, groups, seed
            )

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in
        memory."""
        self.report.to_html(
            file, memory=None if steps is None else self.memory_plan(steps)
        )

    def memory_plan(
        self, steps: int, mesh: Any = None, shard: Mapping[str, Any] | None = None
    ) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs on each device, before any
        is allocated; ``mesh`` and ``shard``: on other devices, as for ``compile``."""
        return measuring.plan_of(self, steps, mesh, shard)

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Measure inside: afterwards states, traces and random numbers are as they were
        before.

        This covers every state that is read or written inside, of the learner or not.
        """
        with self._followed():
            touched: Any = brainstate.StateTraceStack()
            try:
                with touched, self._carried.unmoved():
                    yield
            finally:
                touched.recovery_original_values()

    # ------------------------------------------------------------ saving and copying

    def weights(self) -> Weights:
        """Copies of the parameters as NumPy arrays, by path.

        A parameter that is a structure of arrays, as the weight and the bias of a
        layer, is the same structure of NumPy arrays.
        """
        with self._synchronised():
            return read_weights(self.param_states)

    def set_weights(self, weights: Mapping[Any, Any]) -> None:
        """Set parameters to arrays as :meth:`weights` gives them; others stay.

        The names of reports, as ``'layers.1.weight.bias'``, are keys too.
        """
        with self._synchronised():
            write_weights(self.param_states, weights)

    def save_weights(self, file: str | FilePath) -> None:
        """Write the parameters to a file of safetensors, by the names of reports."""
        with self._synchronised():
            write_safetensors(self.param_states, file)

    def load_weights(self, file: str | FilePath) -> None:
        """Set all parameters to those that :meth:`save_weights` wrote."""
        with self._synchronised():
            read_safetensors(self.param_states, file)

    def save(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Write weights, states, traces, the rule's own state and random numbers to a
        folder, and the state of an optimiser if one is given.

        The newest two that were written to a folder are kept.
        """
        from ..checkpoint import save_learner

        with self._synchronised():
            save_learner(self, folder, optimizer)

    def load(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Continue from what :meth:`save`, a stream or :func:`fit` wrote.

        The learner must be compiled as the one that wrote it: the same model, rule and
        batch size. An error leaves everything as it was.
        """
        from ..checkpoint import load_learner

        with self._synchronised():
            load_learner(self, folder, optimizer)

    def __copy__(self) -> Any:
        """A learner of the same model that shares all states."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise TypeError(
            three_parts(
                f'pickling a {type(self).__name__} learner',
                'it holds compiled programs, which belong to this process',
                'learner.save(folder), and learner.load(folder) of a learner compiled '
                'in the other process; copy.deepcopy(learner) for a second one here',
            )
        )

    def __deepcopy__(self, memo: Any = None) -> Any:
        """A learner of its own on a copy of the model: weights, states, traces, optax
        states."""
        interface_of(self.model).check_copied()
        # This copies the states of the tree and shares all else.
        copied = super().__deepcopy__(memo)
        # Programs, and the graph, hold the states of the model that they were made of.
        copied.executor = compiling.new_executor(copied)
        if copied._example:
            copied.executor.compile_graph(*copied._example)
        optimizers: dict[Any, brainstate.State] = {}
        for key, state in self._kept.optimizers.items():
            optimizers[key] = brainstate.ShortTermState(copy.deepcopy(state.value))
        copied._kept = Kept(optimizers=optimizers, shapes=self._kept.shapes)
        copied._carried = self._carried.copied(copied.traces)
        return copied

    # ------------------------------------------------------------ what there is

    @property
    def is_compiled(self) -> bool:
        """Whether a graph was compiled."""
        return bool(self._compiled_for)

    def check_compiled(self) -> None:
        """Raise unless a graph was compiled."""
        if not self.executor.is_compiled:
            raise compiling.not_compiled(type(self).__name__)

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the model's step."""
        self.check_compiled()
        return self.executor.graph

    @property
    def report(self) -> CompilationReport:
        """What the compiler found, what this rule gives each parameter, and its
        traces."""
        return describing.report_of(self)

    def __repr__(self) -> str:
        return describing.described(self)

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self._example else None

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print groups, parameters with what the rule gives them, and other states."""
        message = self.executor.graph_text(self.report.etrace_weights)
        if verbose:
            print(message)
        return message if return_msg else None

    @property
    def param_states(self) -> FlattedDict:
        """The model's parameters by path."""
        return FlattedDict(module_states(self.model, brainstate.ParamState))

    @property
    def hidden_states(self) -> FlattedDict:
        """The model's hidden states by path."""
        return FlattedDict(module_states(self.model, brainstate.HiddenState))

    @property
    def other_states(self) -> FlattedDict:
        """States that are neither parameters nor hidden."""
        roles = (brainstate.ParamState, brainstate.HiddenState)
        states = module_states(self.model).items()
        return FlattedDict({p: s for p, s in states if not isinstance(s, roles)})

    @property
    def params(self) -> Any:
        """The parameters of a model that is no brainstate module, as its framework
        holds them: a State of Params, an Equinox model, the params of a function."""
        with self._followed():
            return interface_of(self.model).params

    @params.setter
    def params(self, value: Any) -> None:
        with self._followed():
            interface_of(self.model).params = value

    @property
    def state(self) -> Any:
        """What such a model carries from step to step, in the structure in which it was
        given."""
        with self._followed():
            return interface_of(self.model).state

    @state.setter
    def state(self, value: Any) -> None:
        with self._followed():
            interface_of(self.model).state = value

    def get_etrace_of(self, weight: Path | str | brainstate.State) -> Any:
        """The traces of one parameter as the published package gives them: one array
        for each operation, hidden group and array of the parameter, states last.

        :meth:`traces_of` gives them as they are held.
        """
        return member(self, 'get_etrace_of')(weight)

    def traces_of(self, weight: Path | str | brainstate.State) -> Any:
        """The traces of one parameter as they are held, by their names.

        A name holds parameters, operation and hidden states; a trace is one array for
        each of these states that it is carried on, by number. A rule with factorised
        traces, such as pp_prop, gives two such dictionaries: ε_x, one array each, and
        ε_f.
        """
        self.check_compiled()
        path = path_of_parameter(weight, self.param_states)
        found = self._carried.of_parameter(path)
        if not isinstance(self.rule.trace, Factorised):
            return found
        # Sites that cannot be factorised have a whole trace.
        factors = {k: t for k, t in found.items() if isinstance(t, FactorTrace)}
        whole = {k: t for k, t in found.items() if k not in factors}
        return (
            {k: t.x for k, t in factors.items()},
            {k: t.f for k, t in factors.items()} | whole,
        )

    def _held(self) -> tuple[brainstate.State, ...]:
        """The states that a compiled loop of brainstate refers to."""
        own: list[brainstate.State] = [self.running_index]
        own += [] if self.rule_state is None else [self.rule_state]
        return (*known_states(self.model).values(), *self.traces.values(), *own)

    def _count(self, calls: int) -> None:
        """Count calls since the last reset."""
        self.running_index.value = self.running_index.value + calls

    def optimizer_states(self, optimizer: Any) -> dict[str, brainstate.State]:
        """The states of an optimiser as this learner uses it, by name."""
        update_by(check_optimizer(optimizer), self.param_states, self._kept.optimizers)
        if optimizer in self._kept.optimizers:
            return {'state': self._kept.optimizers[optimizer]}
        own = {id(state) for state in self.param_states.values()}
        states = brainstate.graph.states(optimizer).items()
        return {path_name(p): s for p, s in states if id(s) not in own}

    def placed(self, *sequences: Any) -> tuple:
        """Sequences as JAX arrays, on the devices of the learner if it has several."""
        if self.placement is not None and self.placement.has_other_processes:
            return self._placed(sequences, 1)
        return self._placed(jax.tree.map(jnp.asarray, sequences), 1)

    @property
    def own_samples(self) -> slice:
        """The samples of a batch that this process brings; all if it is alone."""
        return slice(None) if self.placement is None else self.placement.own_samples

    def step_solver(
        self, step_fn: Callable[..., Any] | None = None, sequences: tuple = ()
    ) -> tuple[StepBinding, Solver]:
        """The traced step of the model, or of a step function on slices of sequences,
        and what solves it."""
        with self._synchronised():
            if step_fn is None:
                binding = self._model_binding(self._example)
            else:
                binding = self._binding(step_fn, sequences)
            loss = step_fn is not None
            return binding, self._solver(binding, self.rule, loss)

    def is_news(self, text: str) -> bool:
        """Whether a text was not yet said about this learner; it counts as said now."""
        new = text not in self._kept.said
        self._kept.said.add(text)
        return new

    # ------------------------------------------------------------ the rule's own state

    @property
    def modulator(self) -> Any:
        """The standing modulator; None for a rule without one."""
        return self._rule_value() if self.rule.is_modulated else None

    @modulator.setter
    def modulator(self, value: Any) -> None:
        self.set_modulator(value)

    def set_modulator(self, value: Any) -> None:
        """Set the standing modulator of a rule that has one."""
        self.check_modulated(value)
        if self.rule_state is not None:
            self.rule_state.value = jnp.asarray(value, jnp.result_type(float))

    def set_predictor(self, predictor: Any) -> None:
        """Use another predictor of credit at the ends of windows, with weights of its
        own, for a rule that has one."""
        window = self.rule.window
        if window is None or self.rule.predictor is None:
            raise ValueError(
                three_parts(
                    f'a predictor for {self.rule.name}',
                    'it has no predictor',
                    "rule 'dni'",
                )
            )
        self.rule = replace(self.rule, window=replace(window, predictor=predictor))
        self.rule_state = self._new_rule_state()

    def check_modulated(self, value: Any) -> None:
        """Raise unless the rule takes modulators, and this is one."""
        if not self.rule.is_modulated:
            why = 'its traces are multiplied by the derivative of the loss'
            raise ValueError(
                three_parts(
                    f'a modulator for {self.rule.name}', why, "rule 'three_factor'"
                )
            )
        check_modulator(value)

    # ------------------------------------------------------------ starting again

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Reset: the model's states as they were compiled, traces zero.

        With a ``batch_size`` new states are made for it, and that is where fresh
        sequences start from then on.
        """
        check_batch_size(batch_size)
        with self._followed():
            if batch_size is None:
                model_states.restore_start(self)
            else:
                model_states.resize(self, batch_size)
            self._clear_traces()
            self.running_index.value = jnp.zeros((), jnp.int32)

    # ------------------------------------------------------------ parts of every call

    def _clear_traces(self) -> None:
        self._carried.clear()

    # Who may call, and where arrays are: ``access.py``.
    _alone = access.alone
    _followed = access.followed
    _synchronised = access.synchronised
    _placed = access.place_inputs
    _undone_on_error = access.undone_on_error
    # Traces: ``carried.py``.
    _make_traces = carried.make_traces
    _read_traces = carried.read_traces
    _write_traces = carried.write_traces
    # What the rule keeps for itself: ``rule_state.py``.
    _groups = rule_state.groups_of
    _new_rule_state = rule_state.new_rule_state
    _rule_value = rule_state.rule_value
    _next_rule_state = rule_state.next_rule_state
    _write_rule_state = rule_state.write_rule_state
    # What runs: ``programs.py``.
    _run_model = programs.run_model
    _model_binding = programs.bind_model
    _binding = programs.bind_step_fn
    _solver = programs.solver_of
    _is_credited = credit_warnings.is_credited
    _options = programs.options_of
    _program = programs.program_of
    _gradient_program = programs.gradient_program_of
    _loop = programs.loop_of
    _online_step = calls.online_step_of


def _with_common_options(own: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters of a rule's learner, with the options of every learner."""
    every = inspect.signature(Learner.__init__).parameters.values()
    common = [p for p in every if p.kind is p.KEYWORD_ONLY]
    shown = [p for p in own if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in shown}
    return shown + [p for p in common if p.name not in names]
