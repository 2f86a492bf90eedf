"""Compile time of the graph: a stack of GRUs, and growth with equations and positions.

make bench-compile
"""

import time

import brainstate
import jax.numpy as jnp

import braintrace


class Stack(brainstate.nn.Module):
    """GRU layers on top of each other."""

    def __init__(self, layers: int, units: int):
        super().__init__()
        self.layers = [brainstate.nn.GRUCell(units, units) for _ in range(layers)]

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def seconds(
    layers: int, units: int, batch: int, repeats: int = 3
) -> tuple[float, int, int]:
    """Best time to compile, equations and positions of a stack."""
    model = Stack(layers, units)
    brainstate.nn.init_all_states(model, batch)
    x = jnp.ones((batch, units))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        graph = braintrace.compile_etrace_graph(model, x)
        times.append(time.perf_counter() - start)
    return min(times), len(graph.module_info.jaxpr.eqns), layers * units * batch


def main() -> None:
    seconds(1, 8, 2)  # imports and caches of JAX
    print('layers  units  batch  equations  positions        ms    µs/eqn    ns/pos')
    cases = [
        (4, 512, 32),
        *((n, 64, 4) for n in (1, 2, 4, 8, 16, 32)),
        *((2, n, 32) for n in (64, 256, 1024, 4096)),
    ]
    for layers, units, batch in cases:
        best, equations, positions = seconds(layers, units, batch)
        print(
            f'{layers:6} {units:6} {batch:6} {equations:10} {positions:10} {best * 1e3:9.1f} '
            f'{best / equations * 1e6:9.1f} {best / positions * 1e9:9.1f}'
        )


if __name__ == '__main__':
    main()
