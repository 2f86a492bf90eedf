"""What of a step is computed when, and what is kept for derivatives."""

import jax.numpy as jnp

import braintrace
from braintrace.analysis.analysed import analyse
from braintrace.lowering import Stages
from braintrace.lowering.invariants import StepInvariants
from gradients.cases import B, H, I, drawn
from graph.test_executor import Weighted


class Decaying(Weighted):
    """The decay is a function of a parameter, repeated for all samples."""

    def update(self, x):
        decay = jnp.broadcast_to(jnp.exp(-jnp.abs(self.a.value)), (B, H))
        self.h.value = decay * self.h.value + jnp.tanh(x @ self.w.value)
        return jnp.sum(self.h.value**2)


def stages_of(model, x):
    info = braintrace.extract_module_info(model, x)
    return Stages(analyse(info.program), info.program.outputs[:1])


def test_a_costly_function_is_computed_once_before_it_is_repeated():
    stages = stages_of(Decaying({'a': (H,), 'w': (I, H)}, {'h': (B, H)}), drawn(B, I))
    (costly,) = stages.costly
    made_by = stages.equations[stages.dependence.producer[costly]]
    assert made_by.primitive.name == 'exp'
    assert costly.aval.shape == (H,)


class Recurrent(Weighted):
    def update(self, x):
        drive = x @ self.w.value + self.h.value @ self.u.value
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive)
        return jnp.sum(self.h.value**2)


def test_the_loop_keeps_a_sum_in_place_of_its_terms():
    weights = {'w': (I, H), 'u': (H, H)}
    stages = stages_of(Recurrent(weights, {'h': (B, H)}), drawn(B, I))
    (kept,) = stages.kept
    made_by = stages.equations[stages.dependence.producer[kept]]
    assert made_by.primitive.name == 'add'
    assert set(made_by.invars) == set(stages.tap_results)


class Forgetting(Weighted):
    def update(self, x):
        old = self.h.value
        self.h.value = jnp.tanh(x @ self.w.value)
        return jnp.sum(old**2)


def test_the_least_that_a_state_keeps_of_its_value():
    kept = []
    for kind in (Recurrent, Decaying, Forgetting):
        weights = {'w': (I, H), 'u': (H, H), 'a': (H,)}
        stages = stages_of(kind(weights, {'h': (B, H)}), drawn(B, I))
        kept.append(StepInvariants(stages).kept(0))
    assert kept == [0.5, None, 0.0]
