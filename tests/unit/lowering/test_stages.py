"""What of a step is computed when, and what is kept for derivatives."""

import jax.numpy as jnp

import braintrace
from braintrace.analysis.analysed import analyse
from braintrace.lowering import Stages
from gradients.cases import B, H, I, drawn
from unit.lowering.test_executor import Weighted


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
